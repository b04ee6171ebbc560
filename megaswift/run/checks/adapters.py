"""Checks of adapters before a process group exists: folders, packages, compatible base weights."""

from __future__ import annotations

from pathlib import Path

from megaswift.bridge.adapters.options.checks import SHARDED, base_quantization_bits, non_lora_peft_method_of
from megaswift.config import SwiftConfig
from megaswift.engine.options.engine_checks import requested_engine
from megaswift.errors import Problem, UserError
from megaswift.folders.adapter import TASK_TYPES, adapter_peft_type_or_lora, head_kind_of_adapter
from megaswift.models import quantized_training
from megaswift.models.family import read_config_json
from megaswift.models.options.model import ModelConfig
from megaswift.models.spec import SCORE, TOKEN_SCORE
from megaswift.options.tasks import RL

HEADS = {"rm": SCORE, "reranker": SCORE, "seq_cls": SCORE, "token_cls": TOKEN_SCORE}
"""Tasks whose model ends in a classifier's head."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def missing_adapter_file_problems(adapters: str) -> list[Problem]:
    """Report files that a folder of adapters lacks."""
    folder = Path(adapters)
    lacking = [name for name in ADAPTER_FILES if not (folder / name).is_file()]
    if not lacking:
        return []
    rule = f"has no {lacking[0]}" if folder.is_dir() else "no such folder"
    return [Problem(f"--adapters {folder}", rule, "give a folder written by PEFT or by a megaswift run (OUT/adapter)")]


def adapter_task_type_problems(cfg: SwiftConfig) -> list[Problem]:
    """Report a folder of adapters for another task: those of reward models and classifiers have a head beside them."""
    if cfg.lora.adapters is None or missing_adapter_file_problems(cfg.lora.adapters):
        return []
    label = f"--adapters {cfg.lora.adapters}"
    kind = head_kind_of_adapter(Path(cfg.lora.adapters))
    wanted = HEADS.get(cfg.task)
    if kind == wanted:
        return []
    if kind is not None:
        what = "a reward model or a classifier of texts" if kind == SCORE else "a classifier of tokens"
        needs = "a language model" if wanted is None else f"adapters with task_type {TASK_TYPES[wanted]}"
        rule = f"belongs to {what} (task_type {TASK_TYPES[kind]}), but {cfg.task} needs {needs}"
        return [Problem(label, rule, "use other adapters")]
    return [
        Problem(
            label,
            f"belongs to a language model: it has no scalar head (task_type is not {TASK_TYPES[wanted or SCORE]})",
            (
                f"merge it first: megaswift export --adapters {cfg.lora.adapters} --merge_lora true, then give "
                "--model the result"
            ),
        )
    ]


def quantized_or_peft_run_problems(cfg: SwiftConfig, folder: Path) -> list[Problem]:
    """Returns the problems of a run on an engine of torch, with the model in `folder`."""
    kind = cfg.model.train_type
    bits = base_quantization_bits(cfg)
    config = read_config_json(folder)
    label = f"--model {cfg.model.model}"
    problems = quantized_training.quantized_training_problems(config, label, kind, bits, cfg.lora.merge_lora)
    if quantized_training.stays_quantized(config) and requested_engine(cfg) in SHARDED:
        problems.append(
            Problem(
                f"{label}, whose weights are quantized",
                f"cannot be sharded (engine {requested_engine(cfg)})",
                "--engine ddp or zero2",
            )
        )
    if kind == "full":
        return problems
    if cfg.task in RL and quantized_training.quant_method(config) in quantized_training.KERNELS:
        problems.append(
            Problem(
                f"{label}, whose weights are quantized",
                "has no unquantized weights into which adapters could be merged for the sampler",
                quantized_training.PLAIN,
            )
        )
    lacking = quantized_training.missing_package_problems(("peft",), f"--train_type {kind}")
    if bits is not None:
        given = "--train_type qlora" if kind == "qlora" else f"--quantization_bit {bits}"
        problems += quantized_training.missing_package_problems(("bitsandbytes", "accelerate"), given)
    if cfg.lora.adapters is not None:
        return (
            problems
            + lacking
            + (
                missing_adapter_file_problems(cfg.lora.adapters)
                or adapter_train_type_problems(cfg.model, Path(cfg.lora.adapters)) + adapter_task_type_problems(cfg)
            )
        )
    return problems + (lacking or peft_config_problems(cfg))


def adapter_train_type_problems(model: ModelConfig, folder: Path) -> list[Problem]:
    """Report a folder of another kind than `train_type`, or of a kind that cannot be trained further."""
    kind = adapter_peft_type_or_lora(folder)
    label = f"--adapters {folder}"
    if kind == "adalora":
        return [
            Problem(
                label,
                "contains AdaLoRA adapters with final ranks, which PEFT cannot train further",
                "run megaswift export --merge_lora true, then train new adapters on the merged model",
            )
        ]
    wanted = {"qlora": "lora"}.get(model.train_type, model.train_type)
    if kind == wanted:
        return []
    return [Problem(label, f"contains {kind} adapters (train_type is {model.train_type})", f"--train_type {kind}")]


def peft_config_problems(cfg: SwiftConfig) -> list[Problem]:
    """Report what PEFT refuses in an adapter's settings; PEFT is asked (which loads torch) only for adapters whose
    rules are PEFT's alone."""
    if non_lora_peft_method_of(cfg) is None:
        return []
    from megaswift.bridge.adapters import peft_config

    try:
        peft_config.build_peft_config(cfg.model.train_type, cfg.lora, cfg.peft, cfg.train.max_steps)
    except UserError as error:
        return list(error.problems)
    return []
