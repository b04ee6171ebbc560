"""Defaults of other toolkits that differ from megaswift's, and the notice for a command line that is written with their
names.

Owns the tables; docs/migrating.md shows them to readers, and a test compares the two. Names that mean something else
there are in `names/answers.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megaswift.config.rules import ignored_option_names
from megaswift.config.sections import Sections
from megaswift.options.tasks import CHATS, GRPO, PREFERENCES, RL, SAMPLED, TASKS

# Toolkits whose defaults are known: ms-swift at commit 3602360 (2026-08-22), its Megatron part; scripts of TRL 1.16;
# transformers 5.23; Megatron-LM at commit d98e8a6 and LLaMA-Factory at commit ff6d4d1 (both August 2026).
SWIFT = "ms-swift"
MEGATRON_SWIFT = "Megatron-SWIFT"
TRL = "TRL"
TRANSFORMERS = "transformers"
MEGATRON_LM = "Megatron-LM"
LLAMA_FACTORY = "LLaMA-Factory"
PAGE = "docs/migrating.md"


@dataclass(frozen=True)
class DifferingDefault:
    """An option whose default is another one here."""

    option: str
    toolkit: str
    theirs: str
    ours: str
    tasks: tuple[str, ...] = tuple(TASKS)
    adapters: bool | None = None
    """With adapters only, or without only; None: either way."""
    written: str | None = None
    """The value that `megaswift migrate` writes; None: the first word of `theirs`; empty: it depends on the run."""

    @property
    def value(self) -> str:
        """`written`, or what `theirs` begins with."""
        return re.split(r"[\s:;,]", self.theirs)[0] if self.written is None else self.written


_EVERY = tuple(TASKS)
_NOT_RL = tuple(t for t in TASKS if t not in RL)
_CHATS = tuple(t for t in CHATS if t not in RL)
_PT = ("pt",)
_ONE_ROW = "1: a step has one row per rank"
_AT_END = "only at the end"
_BY_TIME = "at the end; every 30 minutes in a run of over an hour"
_DELETED = "2048; longer rows are deleted and counted"
_BOTH = "2048, prompt and completion together"

_UNTYPED = "true without --output_dir, else false"
_CHECKPOINTING = "full (gradient_checkpointing true)"


def _training_arguments(toolkit: str) -> Iterator[DifferingDefault]:
    """What toolkits have from transformers' TrainingArguments."""
    yield DifferingDefault("lr_scheduler_type", toolkit, "linear", "cosine")
    yield DifferingDefault("num_train_epochs", toolkit, "3", "1")
    yield DifferingDefault("per_device_train_batch_size", toolkit, "8", "1")
    yield DifferingDefault("weight_decay", toolkit, "0", "0.1")
    yield DifferingDefault("adam_beta2", toolkit, "0.999", "0.95")
    yield DifferingDefault("save_steps", toolkit, "500", _BY_TIME)
    yield DifferingDefault("dataloader_num_workers", toolkit, "0", "2")
    yield DifferingDefault("report_to", toolkit, "none", "tensorboard")
    yield DifferingDefault("ddp_timeout", toolkit, "1800 seconds", "600 seconds")


CHANGED: tuple[DifferingDefault, ...] = (
    DifferingDefault("num_train_epochs", SWIFT, "3", "1"),
    DifferingDefault(
        "gradient_accumulation_steps", SWIFT, "chosen so that a step has at least 16 rows", _ONE_ROW, written=""
    ),
    DifferingDefault("max_length", SWIFT, "the model's maximum length", _DELETED, _NOT_RL, written=""),
    DifferingDefault("max_length", SWIFT, "the model's maximum length, for the prompt alone", _BOTH, RL, written=""),
    DifferingDefault("truncation_strategy", SWIFT, "left", "delete", RL),
    DifferingDefault("recompute_granularity", SWIFT, _CHECKPOINTING, "none"),
    DifferingDefault("lora_dropout", SWIFT, "0.05", "0", _EVERY, True),
    DifferingDefault("save_steps", SWIFT, "500", _BY_TIME),
    DifferingDefault("eval_steps", SWIFT, "save_steps", _AT_END, written=""),
    DifferingDefault("logging_steps", SWIFT, "5", "1"),
    DifferingDefault("strict", SWIFT, "false: malformed rows are left out", "true: a malformed row stops the run"),
    DifferingDefault("use_hf", SWIFT, "false: ModelScope", "true: Hugging Face"),
    DifferingDefault("packing", SWIFT, "false", "true", PREFERENCES),
    DifferingDefault("beta", SWIFT, "0.04", "0: no reference model", GRPO),
    DifferingDefault("loss_type", SWIFT, "grpo", "dapo", GRPO),
    DifferingDefault("temperature", SWIFT, "0.9", "1", SAMPLED),
    DifferingDefault("vllm_gpu_memory_utilization", SWIFT, "0.9", "0.3", RL),
    DifferingDefault(
        "importance_sampling_mode", SWIFT, "none: no importance weights", "token_truncate", GRPO, written=""
    ),
    DifferingDefault("ddp_timeout", SWIFT, "18000000 seconds", "600 seconds"),
    DifferingDefault("add_version", SWIFT, "true", _UNTYPED),
    DifferingDefault("global_batch_size", MEGATRON_SWIFT, "16", _ONE_ROW),
    DifferingDefault("recompute_granularity", MEGATRON_SWIFT, "selective", "none"),
    DifferingDefault("max_length", MEGATRON_SWIFT, "the model's maximum length", _DELETED, _NOT_RL, written=""),
    DifferingDefault(
        "max_length", MEGATRON_SWIFT, "the model's maximum length, for the prompt alone", _BOTH, RL, written=""
    ),
    DifferingDefault("truncation_strategy", MEGATRON_SWIFT, "left", "delete", RL),
    DifferingDefault("sequence_parallel", MEGATRON_SWIFT, "false", "true if tensor_parallel_size > 1"),
    DifferingDefault("moe_aux_loss_coeff", MEGATRON_SWIFT, "0", "the coefficient in config.json"),
    DifferingDefault("lora_dropout", MEGATRON_SWIFT, "0.05", "0", _EVERY, True),
    DifferingDefault("save_steps", MEGATRON_SWIFT, "500", _BY_TIME),
    DifferingDefault("eval_steps", MEGATRON_SWIFT, "save_steps", _AT_END, written=""),
    DifferingDefault("logging_steps", MEGATRON_SWIFT, "5", "1"),
    DifferingDefault("dataloader_num_workers", MEGATRON_SWIFT, "4", "2"),
    DifferingDefault("loss_scale", MEGATRON_SWIFT, "last_round", "default: all of the assistant's turns", ("sft",)),
    DifferingDefault(
        "strict", MEGATRON_SWIFT, "false: malformed rows are left out", "true: a malformed row stops the run"
    ),
    DifferingDefault("use_hf", MEGATRON_SWIFT, "false: ModelScope", "true: Hugging Face"),
    DifferingDefault("beta", MEGATRON_SWIFT, "0.04", "0: no reference model", GRPO),
    DifferingDefault("loss_type", MEGATRON_SWIFT, "grpo", "dapo", GRPO),
    DifferingDefault("temperature", MEGATRON_SWIFT, "0.9", "1", SAMPLED),
    DifferingDefault("vllm_gpu_memory_utilization", MEGATRON_SWIFT, "0.9", "0.3", RL),
    DifferingDefault("ddp_timeout", MEGATRON_SWIFT, "18000000 seconds", "600 seconds"),
    DifferingDefault("add_version", MEGATRON_SWIFT, "true", _UNTYPED),
    DifferingDefault("learning_rate", TRL, "2e-05", "1e-05", ("sft",), False),
    DifferingDefault("learning_rate", TRL, "2e-05", "0.0001", ("sft",), True),
    DifferingDefault("learning_rate", TRL, "1e-06", "1e-05", ("dpo", "kto", "grpo"), False),
    DifferingDefault("learning_rate", TRL, "1e-06", "0.0001", ("dpo", "kto", "grpo"), True),
    DifferingDefault("learning_rate", TRL, "0.0001", "1e-05", ("rm",), False),
    DifferingDefault("max_length", TRL, "1024; longer rows are truncated", _DELETED, _CHATS),
    DifferingDefault("recompute_granularity", TRL, _CHECKPOINTING, "none"),
    DifferingDefault("packing", TRL, "false", "true", PREFERENCES),
    DifferingDefault("importance_sampling_mode", TRL, "sequence_mask", "token_truncate", GRPO),
    DifferingDefault("truncation_strategy", TRL, "right", "delete", ("sft", "dpo")),
    DifferingDefault("lora_rank", TRL, "16", "8", _EVERY, True),
    DifferingDefault("lora_dropout", TRL, "0.05", "0", _EVERY, True),
    DifferingDefault("logging_steps", TRL, "10", "1"),
    *(row for toolkit in (TRL, TRANSFORMERS, LLAMA_FACTORY) for row in _training_arguments(toolkit)),
    DifferingDefault("learning_rate", TRANSFORMERS, "5e-05", "1e-05", _EVERY, False),
    DifferingDefault("learning_rate", TRANSFORMERS, "5e-05", "0.0001", _EVERY, True),
    DifferingDefault("logging_steps", TRANSFORMERS, "500", "1"),
    DifferingDefault("packing", TRANSFORMERS, "false", "true", PREFERENCES),
    DifferingDefault("learning_rate", LLAMA_FACTORY, "5e-05", "1e-05", _EVERY, False),
    DifferingDefault("learning_rate", LLAMA_FACTORY, "5e-05", "0.0001", _EVERY, True),
    DifferingDefault("logging_steps", LLAMA_FACTORY, "500", "1"),
    DifferingDefault("recompute_granularity", LLAMA_FACTORY, _CHECKPOINTING, "none"),
    DifferingDefault("lora_alpha", LLAMA_FACTORY, "2 * lora_rank", "32", _EVERY, True, written=""),
    DifferingDefault("truncation_strategy", LLAMA_FACTORY, "right", "delete", _CHATS),
    DifferingDefault("packing", LLAMA_FACTORY, "true", "false", _PT),
    DifferingDefault("packing", LLAMA_FACTORY, "false", "true", PREFERENCES),
    DifferingDefault("lr_scheduler_type", MEGATRON_LM, "linear", "cosine"),
    DifferingDefault("weight_decay", MEGATRON_LM, "0.01", "0.1"),
    DifferingDefault("adam_beta2", MEGATRON_LM, "0.999", "0.95"),
    DifferingDefault("torch_dtype", MEGATRON_LM, "float32", "auto"),
    DifferingDefault("sequence_parallel", MEGATRON_LM, "false", "true if tensor_parallel_size > 1"),
    DifferingDefault("moe_aux_loss_coeff", MEGATRON_LM, "0", "the coefficient in config.json"),
    DifferingDefault("packing", MEGATRON_LM, "true: documents follow one another in a row", "false", _PT),
    DifferingDefault("data_split", MEGATRON_LM, "969,30,1", "all indexed data train", _PT),
    DifferingDefault("truncation_strategy", MEGATRON_LM, "split", "delete", _PT),
    DifferingDefault("logging_steps", MEGATRON_LM, "100", "1"),
    DifferingDefault("eval_iters", MEGATRON_LM, "100", "all evaluation rows"),
)
"""Values that a command line written for that toolkit relies on. LoRA's learning rate (1e-4) is ms-swift's."""

SPELLINGS: dict[str, tuple[str, ...]] = {
    MEGATRON_SWIFT: (
        "micro_batch_size",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "expert_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "train_iters",
        "lr_decay_style",
        "lr_warmup_fraction",
        "lr_warmup_iters",
        "save_interval",
        "eval_interval",
        "log_interval",
        "use_distributed_optimizer",
        "use_precision_aware_optimizer",
        "attention_backend",
        "cross_entropy_loss_fusion",
        "no_save_optim",
    ),
    SWIFT: (
        "load_from_cache_file",
        "tuner_type",
        "model_id_or_path",
        "dataset_shuffle",
        "train_dataloader_shuffle",
        "quant_bits",
        "resume_lora",
        "async_generate",
        "multi_turn_scheduler",
        "overlong_filter",
        "rollout_importance_sampling_mode",
        "rollout_importance_sampling_threshold",
        "adalora_init_r",
        "adalora_target_r",
        "vera_rank",
        "vera_dropout",
        "boft_dropout",
        "fourier_n_frequency",
    ),
    TRL: (
        "model_name_or_path",
        "attn_implementation",
        "optim",
        "use_liger_kernel",
        "lora_r",
        "vllm_importance_sampling_correction",
        "vllm_importance_sampling_mode",
        "vllm_importance_sampling_cap",
        "off_policy_sequence_mask_delta",
        "num_ppo_epochs",
    ),
}
"""Spellings by which a command line shows where it comes from, the first toolkit that has one."""


def defaults_differing_from_toolkit(c: Sections, toolkit: str) -> Iterator[DifferingDefault]:
    """The defaults of a toolkit that `c` would have had there and has not here."""
    adapts = c.model.train_type != "full"
    for row in CHANGED:
        applies = row.toolkit == toolkit and c.task in row.tasks and row.option not in c.given
        if row.option == "learning_rate" and c.model.random_init:  # another default, which the first screen shows
            continue
        if applies and row.adapters in (None, adapts):
            yield row


def differing_defaults_notice(c: Sections, names: Iterable[str]) -> Iterator[str]:
    """One notice where the user's names are another toolkit's and options that were left out mean something else."""
    used = list(names)
    for toolkit, spellings in SPELLINGS.items():
        foreign = [name for name in used if name in spellings]
        if not foreign:
            continue
        idle = ignored_option_names(c)
        if rows := [row for row in defaults_differing_from_toolkit(c, toolkit) if row.option not in idle]:
            listed = "; ".join(f"{row.option} {row.ours} ({row.theirs})" for row in rows)
            yield (
                f"{foreign[0]} is an option name of {toolkit}. Options that are not given have different defaults in "
                f"megaswift ({PAGE}; in parentheses: {toolkit}'s): {listed}"
            )
            return


def differing_default_table_rows(toolkit: str) -> list[tuple[str, str, str, str]]:
    """Rows of the page: option, default there, default here, where it counts."""
    return [(f"`{r.option}`", r.theirs, r.ours, _where(r)) for r in CHANGED if r.toolkit == toolkit]


def _where(row: DifferingDefault) -> str:
    of = "" if row.tasks == _EVERY else ", ".join(t for t in TASKS if t in row.tasks)
    if len(row.tasks) > len(TASKS) // 2 and of:
        of = "all but " + ", ".join(t for t in TASKS if t not in row.tasks)
    trained = {None: "", True: "adapters", False: "full"}[row.adapters]
    return "; ".join(part for part in (of, trained) if part)
