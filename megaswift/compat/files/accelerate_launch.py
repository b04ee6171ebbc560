"""Translates settings of `accelerate launch` (flags, or `--config_file FILE`) into options of the run. Each setting
is applied, reported as without effect, or rejected. Names and meanings: accelerate 1.15.

A run's own options override these.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megaswift.compat.files.accelerate_parallel import (
    MEGATRON,
    model_parallel_notices,
    model_parallel_options,
    refused_model_parallelism,
    splits_model,
)
from megaswift.compat.names.translated import PRECISIONS
from megaswift.config.sections import Sections
from megaswift.engine.options.engine import FSDP_STRATEGY_OF_SPELLING, NO_SHARD, NOTHING_WRAPPED, PREFETCH_SPELLINGS
from megaswift.errors import Problem
from megaswift.options.sources import ConfigSource, GivenOptionValue
from megaswift.options.values import option_value_text

ZERO = "ACCELERATE_USE_DEEPSPEED"
FSDP = "ACCELERATE_USE_FSDP"
_ZERO = "ACCELERATE_DEEPSPEED_"
_KINDS = {("2", "cpu", "none"): "zero2_offload", ("3", "cpu", "cpu"): "zero3_offload"} | {
    (stage, "none", "none"): f"zero{stage}" for stage in "0123"
}
"""Stage, and where optimizer and weights are kept, as one of our engines; others need a DeepSpeed file."""
_WITHOUT_EFFECT = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
        "gradient_accumulation_steps",
        ("1", "auto"),
        "--gradient_accumulation_steps",
    ),
    "ACCELERATE_GRADIENT_CLIPPING": ("gradient_clipping", ("auto", "none"), "--max_grad_norm"),
    "ACCELERATE_DYNAMO_BACKEND": ("dynamo_backend", ("no",), "--torch_compile"),
    "FSDP_AUTO_WRAP_POLICY": (
        "fsdp_auto_wrap_policy",
        ("transformer_based_wrap", "size_based_wrap"),
        "--fsdp_transformer_layer_cls_to_wrap",
    ),
    "FSDP_STATE_DICT_TYPE": ("fsdp_state_dict_type", ("full_state_dict",), "the format of checkpoints, full tensors,"),
    "FSDP_USE_ORIG_PARAMS": ("fsdp_use_orig_params", ("true",), "torch's FSDP2"),
    "FSDP_CPU_RAM_EFFICIENT_LOADING": ("fsdp_cpu_ram_efficient_loading", ("true",), "loading shard by shard"),
}
"""Variable: accelerate's name for it, values that say nothing, and what decides it here."""


def options_from_accelerate_environment(environ: Mapping[str, str]) -> ConfigSource:
    """The options that accelerate's settings amount to, and which of them cannot be followed."""
    givens = [*_precision(environ)]
    problems = [*_refused(environ)]
    if _on(environ, ZERO) and not problems:
        givens.append(GivenOptionValue("deepspeed", _zero(environ), "accelerate's deepspeed_config"))
    if not problems:
        givens += model_parallel_options(environ)
    if _on(environ, FSDP) and not problems and not splits_model(environ):
        own = [*_fsdp(environ)]
        givens = [g for g in givens if g.name not in {o.name for o in own}] + own
    return ConfigSource(tuple(givens), tuple(problems))


def accelerate_notices(environ: Mapping[str, str], c: Sections, alone: bool) -> Iterator[str]:
    """Yield what the run took from accelerate's settings, and what of them has no effect. `alone`: the run is this one
    process."""
    givens = options_from_accelerate_environment(environ).givens
    taken = [g for g in givens if _plain(c.value(g.name)) == g.value]
    if taken:
        yield f"from accelerate's settings: {' '.join(f'--{g.name} {option_value_text(g.value)}' for g in taken)}"
    for g in givens:
        if g not in taken:
            yield f"{g.label} has no effect: --{g.name} {option_value_text(c.value(g.name))} of the run overrides it"
    yield from settings_without_effect(environ)
    one = environ.get("FSDP_VERSION", "1") == "1" and not splits_model(environ)
    if _on(environ, FSDP) and one and _sharding(environ) != NO_SHARD:
        yield "fsdp_version 1 has no effect: FSDP2 is always used"
    if alone and {"ACCELERATE_MIXED_PRECISION", "MASTER_PORT"} <= environ.keys():
        yield (
            "accelerate started one process (with --cpu it ignores --num_processes). For several, use "
            "accelerate launch --multi_gpu (on a CPU too), or torchrun"
        )


def settings_without_effect(environ: Mapping[str, str]) -> Iterator[str]:
    """A line for each setting that something else determines here."""
    for variable, (name, silent, instead) in _WITHOUT_EFFECT.items():
        value = environ.get(variable, "").lower()
        idle = variable.startswith("FSDP_") and not _on(environ, FSDP)
        if value and value not in silent and not idle:
            yield f"accelerate's {name} {value} has no effect: {instead} determines it"
    yield from model_parallel_notices(environ)
    if splits_model(environ) and _on(environ, FSDP):
        yield "accelerate's fsdp_config has no effect: tensor and context parallelism are the native engine's"
    classes = environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "None")
    if classes != "None" and _on(environ, FSDP) and _sharding(environ) == NO_SHARD:
        yield f"accelerate's fsdp_transformer_layer_cls_to_wrap {classes} has no effect: {NOTHING_WRAPPED}"


def python_api_accelerate_engine_problems(environ: Mapping[str, str]) -> list[Problem]:
    """For the Python API, whose configuration is made by the user's own code: engines asked of accelerate."""
    settings = {ZERO: ("deepspeed", "zero2"), FSDP: ("fsdp", "fsdp2"), MEGATRON: ("megatron_lm", "megatron")}
    return [
        Problem(
            f"accelerate launch --use_{name}",
            "the Python API does not read accelerate's settings",
            f"accelerate launch --multi_gpu ..., and SwiftConfig(engine='{engine}')",
        )
        for variable, (name, engine) in settings.items()
        if _on(environ, variable)
    ]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").lower() in ("true", "1")


def _value(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name, "none").lower()


def _precision(environ: Mapping[str, str]) -> Iterator[GivenOptionValue]:
    precision = environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision in PRECISIONS:
        yield GivenOptionValue("torch_dtype", PRECISIONS[precision], f"accelerate's mixed_precision {precision}")


def _zero_key(environ: Mapping[str, str]) -> tuple[str, str, str]:
    offloads = (_value(environ, f"{_ZERO}OFFLOAD_{part}_DEVICE") for part in ("OPTIMIZER", "PARAM"))
    return (environ.get(f"{_ZERO}ZERO_STAGE", "2"), *offloads)  # type: ignore[return-value]


def _zero(environ: Mapping[str, str]) -> str:
    return environ.get(f"{_ZERO}CONFIG_FILE") or _KINDS.get(_zero_key(environ)) or _offloading_config(environ)


def _offloading_config(environ: Mapping[str, str]) -> str:
    """A DeepSpeed configuration, as JSON, for offloads that no engine's name stands for: to NVMe, or of the weights
    alone."""
    stage, *devices = _zero_key(environ)
    zero: dict[str, Any] = {"stage": int(stage)}
    for part, device in zip(("OPTIMIZER", "PARAM"), devices, strict=True):
        if device != "none":
            folder = environ.get(f"{_ZERO}OFFLOAD_{part}_NVME_PATH")
            zero[f"offload_{part.lower()}"] = {"device": device} | (
                {"nvme_path": folder} if device == "nvme" and folder else {}
            )
    return json.dumps({"zero_optimization": zero})


def _fsdp(environ: Mapping[str, str]) -> Iterator[GivenOptionValue]:
    if _sharding(environ) == NO_SHARD:
        yield GivenOptionValue("engine", "ddp", "accelerate's fsdp_sharding_strategy NO_SHARD")
        if _on(environ, "FSDP_OFFLOAD_PARAMS"):
            yield GivenOptionValue("fsdp", ["offload"], "accelerate's fsdp_offload_params")
    else:
        words = [_sharding(environ)]
        if _on(environ, "FSDP_OFFLOAD_PARAMS"):
            words.append("offload")
        yield GivenOptionValue("fsdp", words, "accelerate's fsdp_config")
    classes = environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "None")
    if classes != "None" and _sharding(environ) != NO_SHARD:
        yield GivenOptionValue(
            "fsdp_transformer_layer_cls_to_wrap",
            classes.split(","),
            f"accelerate's fsdp_transformer_layer_cls_to_wrap {classes}",
        )
    if _sharding(environ) != NO_SHARD:
        yield from _units_and_prefetch(environ)
    if _on(environ, "FSDP_ACTIVATION_CHECKPOINTING"):
        yield GivenOptionValue("recompute_granularity", "full", "accelerate's fsdp_activation_checkpointing")


def _units_and_prefetch(environ: Mapping[str, str]) -> Iterator[GivenOptionValue]:
    """FSDP's settings of speed and memory, where they are not what is so anyway."""
    if _value(environ, "FSDP_AUTO_WRAP_POLICY") == "size_based_wrap":
        size = int(environ.get("FSDP_MIN_NUM_PARAMS", "100000000"))
        yield GivenOptionValue("fsdp_min_num_params", size, f"accelerate's fsdp_min_num_params {size}")
    before = _value(environ, "FSDP_BACKWARD_PREFETCH")
    if before != "backward_pre" and "FSDP_BACKWARD_PREFETCH" in environ:
        label = f"accelerate's fsdp_backward_prefetch {before}"
        yield GivenOptionValue("fsdp_backward_prefetch", PREFETCH_SPELLINGS.get(before, before), label)
    if _on(environ, "FSDP_FORWARD_PREFETCH"):
        yield GivenOptionValue("fsdp_forward_prefetch", True, "accelerate's fsdp_forward_prefetch true")


def _sharding(environ: Mapping[str, str]) -> str:
    if environ.get("FSDP_VERSION") == "2":
        return "shard_grad_op" if _value(environ, "FSDP_RESHARD_AFTER_FORWARD") == "false" else "full_shard"
    return FSDP_STRATEGY_OF_SPELLING.get(_value(environ, "FSDP_SHARDING_STRATEGY"), "full_shard")


def _refused(environ: Mapping[str, str]) -> Iterator[Problem]:
    only = "is not supported: only the launcher of accelerate is used"
    yield from refused_model_parallelism(environ)
    if environ.get("ACCELERATE_MIXED_PRECISION") == "fp8":
        yield Problem(
            "accelerate's mixed_precision fp8",
            only,
            "use --mixed_precision bf16, and --fp8_format hybrid after the script",
        )
    if _on(environ, ZERO):
        yield from _refused_zero(environ)
    if _on(environ, FSDP):
        yield from _refused_fsdp(environ)


def _refused_zero(environ: Mapping[str, str]) -> Iterator[Problem]:
    stage, optimizer, weights = _zero_key(environ)
    what = "accelerate's deepspeed_config"
    if not environ.get(f"{_ZERO}CONFIG_FILE"):
        if stage not in ("0", "1", "2", "3"):
            yield Problem(f"{what}: zero_stage: {stage}", "is not a stage of ZeRO", "zero_stage: 2")
        for part, device in (("optimizer", optimizer), ("param", weights)):
            if device not in ("none", "cpu", "nvme"):
                rule = "is not a device that DeepSpeed offloads to"
                yield Problem(f"{what}: offload_{part}_device: {device}", rule, "none, cpu or nvme")
            elif device == "nvme" and _value(environ, f"{_ZERO}OFFLOAD_{part.upper()}_NVME_PATH") == "none":
                variable = f"{_ZERO}OFFLOAD_{part.upper()}_NVME_PATH"
                fix = f"offload_{part}_nvme_path: /local_nvme; accelerate launch does not pass it on: export {variable}"
                yield Problem(f"{what}: offload_{part}_device: nvme", "needs a folder on the drive", fix)
    if environ.get(f"{_ZERO}MOE_LAYER_CLS_NAMES"):
        yield Problem("accelerate's deepspeed_moe_layer_cls_names", "is not supported", "leave it out")


def _refused_fsdp(environ: Mapping[str, str]) -> Iterator[Problem]:
    if environ.get("FSDP_IGNORED_MODULES", "None") != "None":
        yield Problem("accelerate's fsdp_ignored_modules", "is not supported", "leave it out")
