"""Options of other toolkits that ask for what a run does anyway: they are accepted, and one line says so.

Owns the table and the reason of each. A value that asks for something else is refused with the entry's advice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from megaswift.compat.names.absent import ANY, EITHER, OFF, ON, UNSUPPORTED, ForeignOptionRow
from megaswift.compat.names.megatron_lm import NEWER_FIELDS, UNSUPPORTED_OF_MEGATRON, UNSUPPORTED_PATTERNS
from megaswift.options.values import FALSE, TRUE


@dataclass(frozen=True)
class NeutralOption:
    """An option without effect here."""

    values: tuple[str, ...]
    """The values that are accepted, in lower case, true and false for every spelling of these; ANY: all."""
    reason: str
    """Why nothing changes."""
    otherwise: str = ""
    """The fix for another value."""
    unless: str = ""
    """An option of megaswift beside which it would have an effect, unless switched off."""
    true_with: tuple[str, str] = ("", "")
    """An option of megaswift and the value with which `true` changes nothing either."""

    def accepts(self, value: Any) -> bool:
        """Whether the value asks for what happens anyway; None sets nothing."""
        text = str(value).strip().lower()
        spelled = "false" if text in FALSE else text
        if text in TRUE:
            spelled = "true"
        if value is None or self.values == ANY or {text, spelled} & {*self.values}:
            return True
        return _number(text) is not None and _number(text) in {_number(v) for v in self.values}

    def may_accept(self, value: Any) -> bool:
        """Whether the value asks for what happens anyway, if not in every run, then with `true_with`."""
        return self.accepts(value) or (bool(self.true_with[0]) and str(value).strip().lower() in TRUE)

    def with_value(self, value: Any) -> NeutralOption:
        """The entry with only those conditions that an accepted value depends on."""
        off = str(value).strip().lower() in FALSE
        always = self.accepts(value)
        return replace(self, unless="" if off else self.unless, true_with=("", "") if always else self.true_with)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


_SAFETENSORS = NeutralOption(ON, "weights are saved as safetensors")
_FUSED = NeutralOption(EITHER, "fused kernels are selected by device and --transformer_impl")
_PER_TOKEN = NeutralOption(ON, "the loss is a mean over the label tokens of the global batch")
_UNUSED_COLUMNS = "columns that the row format does not use are ignored"
_RESUME = "resume_from_checkpoint"
_FROM_START = "--model DIR starts from its weights, and --resume_from_checkpoint continues a run"
_WEIGHTS_ONLY = "--model and --adapters start from the weights of a checkpoint, at the first step and row of data"
_EVAL_DTYPE = "evaluation computes in --torch_dtype"
_SAMPLER_LIMIT = "--max_length, prompt plus completion, is the sampler's limit"
_WORKERS = "--dataloader_num_workers threads read ahead and last for the whole run"

_TP_COMM = "Transformer Engine reads --tp_comm_overlap_{0}"
_ATOMIC = "`atomic_gemm: true` in the file of --tp_comm_overlap_cfg"

FSDP_SETTLED = {
    "use_orig_params": "FSDP2 always keeps the original parameters",
    "limit_all_gathers": "FSDP2 always limits all-gathers, without stopping the CPU",
    "auto_wrap_policy": "the decoder layers are the units, or --fsdp_transformer_layer_cls_to_wrap, or "
    "--fsdp_min_num_params",
    "sync_module_states": "every rank loads only its shard of the weights",
    "cpu_ram_efficient_loading": "every rank loads only its shard of the weights",
    "state_dict_type": "checkpoints contain full tensors, from which any number of processes can resume",
    "version": "FSDP2 is always used",
}
"""Settings of FSDP that change memory or speed, not results, and why they change nothing here."""

NEUTRAL: dict[str, NeutralOption] = {
    # data
    "lazy_tokenize": NeutralOption(EITHER, "rows are tokenized before training; --streaming true reads on demand"),
    "dataloader_pin_memory": NeutralOption(ON, "batches are copied from pinned memory"),
    "dataloader_drop_last": NeutralOption(ON, "every step has a full global batch"),
    "dataloader_persistent_workers": NeutralOption(EITHER, _WORKERS),
    "dataloader_prefetch_factor": NeutralOption(ANY, _WORKERS),
    "remove_unused_columns": NeutralOption(EITHER, _UNUSED_COLUMNS),
    "label_names": NeutralOption(("labels",), _UNUSED_COLUMNS, "leave it out"),
    "padding_side": NeutralOption(("right",), "rows are padded on the right", "leave it out"),
    "val_dataset_shuffle": NeutralOption(OFF, "validation rows keep their order", "leave it out"),
    "packing_strategy": NeutralOption(("binpack", "bfd"), "rows are packed by best fit", "leave it out"),
    "dataset_train_split": NeutralOption(
        ("train",), "the split train of a data set is read", "--dataset FILE, with the rows of that split"
    ),
    # the loss and the kernels
    **dict.fromkeys(
        ("assistant_only_loss", "completion_only_loss"),
        NeutralOption(
            (*ON, "none"),
            "only the assistant's turns, or the completion, carry loss",
            "--loss_scale all trains on every token",
            unless="loss_scale",
        ),
    ),
    "calculate_per_token_loss": _PER_TOKEN,
    "average_tokens_across_devices": _PER_TOKEN,
    "cross_entropy_loss_fusion": NeutralOption(ON, "the loss is computed on vocabulary shards", "leave it out"),
    "cross_entropy_fusion_impl": NeutralOption(ANY, "the loss is computed on vocabulary shards"),
    "use_logits_to_keep": NeutralOption(EITHER, "logits are computed only where there is a label"),
    "accumulate_allreduce_grads_in_fp32": NeutralOption(ON, "gradients are accumulated in float32", "leave it out"),
    "attention_softmax_in_fp32": NeutralOption(ON, "softmax is computed in float32", "leave it out"),
    "moe_router_dtype": NeutralOption(("fp32", "float32"), "routers compute in float32", "leave it out"),
    "moe_router_load_balancing": NeutralOption(
        ON, "config.json or --moe_aux_loss_coeff sets the balancing loss", "--moe_aux_loss_coeff 0 disables balancing"
    ),
    "moe_router_load_balancing_type": NeutralOption(
        ("aux_loss",),
        "--moe_aux_loss_coeff sets the weight of the balancing loss, of which aux_loss is the only kind",
        "leave it out; --moe_aux_loss_coeff 0 disables balancing",
    ),
    "moe_token_drop_policy": NeutralOption(
        ("probs",), "--moe_expert_capacity_factor drops the tokens of smallest weight", "leave it out"
    ),
    "experts_impl": NeutralOption(ANY, "the implementation of experts is selected by device and engine"),
    "masked_softmax_fusion": _FUSED,
    "bias_dropout_fusion": _FUSED,
    "bias_swiglu_fusion": _FUSED,
    "bias_activation_fusion": _FUSED,
    "apply_rope_fusion": _FUSED,
    "rope_fusion": _FUSED,
    "use_mcore_models": NeutralOption(ON, "Megatron-Core models are used", "leave it out"),
    "gradient_checkpointing_kwargs": NeutralOption(ANY, "recomputation gives the same gradients either way"),
    "use_cpu_initialization": NeutralOption(EITHER, "every rank loads only its shard of the weights"),
    "perform_initialization": NeutralOption(OFF, "weights are loaded from --model DIR", "--random_init true"),
    "init_method_std": NeutralOption(ANY, "weights are loaded from --model DIR", unless="random_init"),
    "offload_bridge": NeutralOption(OFF, "weights are converted tensor by tensor", "leave it out"),
    "manual_gc": NeutralOption(OFF, "Python's automatic garbage collection stays on", "leave it out"),
    "vllm_max_model_len": NeutralOption(ANY, _SAMPLER_LIMIT),
    "vllm_max_model_length": NeutralOption(ANY, _SAMPLER_LIMIT),
    "vllm_max_lora_rank": NeutralOption(ANY, "it follows --lora_rank"),
    # tensor parallelism
    "tp_comm_split_ag": NeutralOption(ON, _TP_COMM.format("ag"), "--tp_comm_overlap_ag false"),
    "tp_comm_split_rs": NeutralOption(ON, _TP_COMM.format("rs"), "--tp_comm_overlap_rs false"),
    "tp_comm_atomic_ag": NeutralOption(OFF, _TP_COMM.format("ag"), _ATOMIC),
    "tp_comm_atomic_rs": NeutralOption(OFF, _TP_COMM.format("rs"), _ATOMIC),
    # FSDP
    **{
        prefix + name: NeutralOption(ANY, reason)
        for name, reason in FSDP_SETTLED.items()
        for prefix in ("fsdp_", "")[: 1 if name in ("version", "auto_wrap_policy", "state_dict_type") else 2]
    },
    # data parallelism
    "ddp_find_unused_parameters": NeutralOption(EITHER, "gradients of unused parameters are zero"),
    "find_unused_parameters": NeutralOption(EITHER, "gradients of unused parameters are zero"),
    "ddp_bucket_cap_mb": NeutralOption(ANY, "the engine sets the bucket size"),
    "ddp_broadcast_buffers": NeutralOption(EITHER, "all ranks load the same buffers"),
    "distributed": NeutralOption(ON, "the launcher starts --nproc_per_node processes", "--nproc_per_node 1"),
    **{name: NeutralOption(OFF, "--torch_dtype sets the precision") for name in ("fp16", "fp32")},
    "fp16_opt_level": NeutralOption(ANY, "--torch_dtype sets the precision"),
    "half_precision_backend": NeutralOption(
        ("auto", "amp", "cuda_amp", "cpu_amp"),
        "--torch_dtype sets the precision",
        "leave it out: --torch_dtype sets the precision in place of apex's amp",
    ),
    "check_model": NeutralOption(EITHER, "model files are checked before the run starts"),
    "use_torchrun": NeutralOption(ON, "torchrun is the default launcher", "leave it out"),
    # what trains
    "finetune": NeutralOption(EITHER, _FROM_START, unless=_RESUME),
    "no_load_optim": NeutralOption(EITHER, _FROM_START, unless=_RESUME),
    "no_load_rng": NeutralOption(EITHER, _FROM_START, unless=_RESUME),
    "resume_only_model": NeutralOption(EITHER, _WEIGHTS_ONLY, unless=_RESUME),
    "lora_bias": NeutralOption(
        ("none",), "biases of the model are frozen with LoRA", "--modules_to_save NAME trains whole modules"
    ),
    "lora_task_type": NeutralOption(("causal_lm",), "adapters are of a causal language model", "leave it out"),
    "tuner_backend": NeutralOption(("peft",), "adapters have PEFT's format", "leave it out"),
    "quant_method": NeutralOption(
        ("bnb", "bitsandbytes"), "--quantization_bit uses bitsandbytes", "--quantization_bit 4"
    ),
    # evaluation, logs, checkpoints
    "save_safetensors": _SAFETENSORS,
    "load_safetensors": NeutralOption(ON, "weights are read from safetensors", "--model DIR, a Hugging Face folder"),
    "safe_serialization": _SAFETENSORS,
    "save_on_each_node": NeutralOption(OFF, "all nodes write to one shared folder", "leave it out"),
    "eval_accumulation_steps": NeutralOption(ANY, "evaluation accumulates sums only"),
    "fp16_full_eval": NeutralOption(OFF, _EVAL_DTYPE, "leave it out", true_with=("torch_dtype", "float16")),
    "bf16_full_eval": NeutralOption(OFF, _EVAL_DTYPE, "leave it out", true_with=("torch_dtype", "bfloat16")),
    "logging_strategy": NeutralOption(("steps",), "--logging_steps N is in steps", "--logging_steps N"),
    "plot_loss": NeutralOption(ON, "curves are always plotted (OUT/loss.png, OUT/report.html)", "leave it out"),
    "disable_tqdm": NeutralOption(EITHER, "progress is one line per logged step"),
    "include_num_input_tokens_seen": NeutralOption(EITHER, "metrics.jsonl contains the number of tokens"),
    "warmup_type": NeutralOption(("linear",), "warmup is linear", "leave it out"),
    "do_train": NeutralOption(ON, "this command trains", "leave it out"),
    "mode": NeutralOption(
        ("train", "training"), "this command trains", "use the command's name: megaswift infer, megaswift deploy"
    ),
    "do_eval": NeutralOption(EITHER, "evaluation follows --val_dataset and --eval_steps"),
    "local_rank": NeutralOption(ANY, "the launcher's environment variables set the rank"),
}
"""Names of ms-swift, Megatron-LM, transformers and TRL."""


def _by_name(rows: Iterable[ForeignOptionRow]) -> dict[str, NeutralOption]:
    return {name: NeutralOption(v, reason, fix) for names, v, reason, fix in rows for name in names.split()}


ABSENT = _by_name((*UNSUPPORTED, *UNSUPPORTED_OF_MEGATRON))
"""What training does not have, where the default is accepted."""
NEWER = _by_name(NEWER_FIELDS)
"""The same of fields that the installed Megatron-Core may not have yet."""


def neutral_option(name: str) -> NeutralOption | None:
    """The entry of a name of another toolkit's training options; None where there is none."""
    found = NEUTRAL.get(name) or ABSENT.get(name)
    reason = next((reason for rule, reason in UNSUPPORTED_PATTERNS if re.fullmatch(rule, name)), "")
    return found or (NeutralOption(ANY, reason) if reason else None)
