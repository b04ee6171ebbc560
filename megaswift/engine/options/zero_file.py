"""Merges a user's DeepSpeed JSON with the run: fills in "auto" and reports conflicts. Pure, no torch, no DeepSpeed.

Owns the presets of the six kinds (`configs/deepspeed/*.json` are these, written out), the meaning of "auto", and the
list of what the torch engine serves. Batch sizes, clipping, learning rate and optimizer are the run's own, so the file
may repeat them, not change them; a key that would be ignored is a mistake. What DeepSpeed itself is then given is made
by `megaswift.engine.torch.strategies.zero_config`.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaswift.config.sections import Sections
from megaswift.engine.options.zero_keys import unserved_key_problems, without_switched_off_keys
from megaswift.errors import Problem, did_you_mean_hint
from megaswift.options.option_json import read_option_object
from megaswift.trainers.options.batch_sizes import accumulation_steps

KINDS = {
    "zero0": (0, False, False),
    "zero1": (1, False, False),
    "zero2": (2, False, False),
    "zero3": (3, False, False),
    "zero2_offload": (2, True, False),
    "zero3_offload": (3, True, True),
}
"""Kind: stage, whether the optimizer is kept on the CPU, whether the weights are too."""

PRECISIONS = {"bf16": "bfloat16", "fp16": "float16"}
LOSS_SCALE_OPTIONS = {
    "initial_scale_power": "--initial_loss_scale",
    "loss_scale_window": "--loss_scale_window",
    "hysteresis": "--hysteresis",
    "min_loss_scale": "--min_loss_scale",
}
"""Number of the section `fp16`: the option."""
FP16_ONLY = {"loss_scale": 0, "consecutive_hysteresis": False, "fp16_master_weights_and_grads": False}
"""Keys of the section `fp16`, with the only value that goes."""

SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
IDLE_PARAMS: Mapping[str, Any] = {
    "adam_w_mode": True,
    "bias_correction": True,
    "amsgrad": False,
    "fp32_optimizer_states": True,
    "torch_adam": None,
    "warmup_type": None,
    "total_num_steps": None,
    "last_batch_iteration": -1,
}
"""Further parameters of an optimizer or a schedule, with the only value that goes; None: any."""


@dataclass(frozen=True)
class LossScaleNumbers:
    """Numbers of the dynamic loss scale, under the names of DeepSpeed's section `fp16`."""

    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    min_loss_scale: int = 1


@dataclass(frozen=True)
class DeepspeedAutoValues:
    """What the run says, in place of "auto"."""

    per_device: int
    accumulation: int
    world: int | None
    """Processes; None: not known yet."""
    learning_rate: float
    warmup_init: float | None
    """Learning rate of the first warmup step; None without a warmup."""
    min_lr: float
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    clip: float
    schedule: str
    dtype: str
    """float32, bfloat16 or float16."""
    hidden_size: int | None = None
    """The model's hidden size; None: DeepSpeed's own bucket sizes stand in for "auto"."""
    loss_scale: LossScaleNumbers = LossScaleNumbers()
    """The loss scale of float16."""


@dataclass(frozen=True)
class FilledDeepspeedConfig:
    """A configuration without "auto", and everything that is wrong with it."""

    kind: str
    config: dict[str, Any]
    problems: tuple[Problem, ...] = ()


def deepspeed_auto_values(cfg: Sections, world: int | None, dtype: str, hidden_size: int | None) -> DeepspeedAutoValues:
    """What `cfg` says, on `world` processes, in the precision that the run takes."""
    train = cfg.train
    o = cfg.optim
    schedule = cfg.schedule
    warmup_init = schedule.lr_warmup_init
    if schedule.lr_warmup_init_ratio is not None:
        warmup_init = schedule.lr_warmup_init_ratio * o.learning_rate
    return DeepspeedAutoValues(
        train.per_device_train_batch_size,
        accumulation_steps(train, world or 1),
        world,
        o.learning_rate,
        warmup_init if schedule.warmup_steps or schedule.warmup_ratio else None,
        schedule.min_lr if schedule.min_lr_ratio is None else schedule.min_lr_ratio * o.learning_rate,
        (o.adam_beta1, o.adam_beta2),
        o.adam_epsilon,
        o.weight_decay,
        o.max_grad_norm,
        schedule.lr_scheduler_type,
        dtype,
        hidden_size,
        LossScaleNumbers(
            round(math.log2(o.initial_loss_scale)), o.loss_scale_window, o.hysteresis, int(o.min_loss_scale)
        ),
    )


def deepspeed_preset(kind: str) -> dict[str, Any]:
    """The configuration of a kind, with "auto" where the run decides."""
    stage, optimizer, weights = KINDS[kind]
    zero: dict[str, Any] = {"stage": stage}
    if stage:
        zero |= {"reduce_bucket_size": "auto", "contiguous_gradients": True, "overlap_comm": stage != 1}
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    zero |= {"offload_optimizer": {"device": "cpu", "pin_memory": True}} if optimizer else {}
    zero |= {"offload_param": {"device": "cpu", "pin_memory": True}} if weights else {}
    autos = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    halves = {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
    return {"zero_optimization": zero, **halves, **dict.fromkeys(autos, "auto")}


def offloads_optimizer_and_weights(config: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether a configuration keeps (the optimizer, the weights) off the device."""
    zero = config.get("zero_optimization") or {}
    optimizer, weights = (
        (zero.get(f"offload_{part}") or {}).get("device", "none") != "none" for part in ("optimizer", "param")
    )
    return optimizer, weights


def matching_deepspeed_preset(config: Mapping[str, Any]) -> str | None:
    """The kind that a configuration belongs to; None where it belongs to none. At stage 3 either part may be
    offloaded."""
    stage = (config.get("zero_optimization") or {}).get("stage", 0)
    optimizer, weights = offloads_optimizer_and_weights(config)
    kind = f"zero{stage}_offload" if optimizer or weights else f"zero{stage}"
    return kind if kind in KINDS and (stage == 3 or not weights) else None


def read_deepspeed_json(named: str) -> dict[str, Any]:
    """The JSON object of a file, or JSON itself; ConfigError where there is none."""
    fix = f"give one of {', '.join(KINDS)}, or a JSON file such as configs/deepspeed/zero2.json"
    return without_switched_off_keys(read_option_object(named, f"--deepspeed {named}", fix))


def deepspeed_json_text(settings: Mapping[str, Any]) -> str:
    """Settings of a YAML file or of Python as JSON. YAML 1.1 reads 5e8 and 3e-5 as text: they become numbers."""
    return json.dumps(_with_yaml_numbers(settings))


def _with_yaml_numbers(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _with_yaml_numbers(v) for name, v in value.items()}
    if isinstance(value, list):
        return [_with_yaml_numbers(v) for v in value]
    is_number = isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value)
    return float(value) if is_number else value


def deepspeed_label(named: str) -> str:
    """How messages name a file given by `--deepspeed`, or JSON."""
    return "--deepspeed" if named.lstrip().startswith("{") else Path(named).name


def missing_deepspeed_problems(kind: str) -> list[Problem]:
    """The problem that DeepSpeed is not installed, where it is not."""
    if importlib.util.find_spec("deepspeed") is not None:
        return []
    return [
        Problem(
            f"--engine {kind}",
            "deepspeed is not installed",
            "run pip install 'megaswift[deepspeed]', or use --engine fsdp2",
        )
    ]


def fill_deepspeed_auto(given: Mapping[str, Any], facts: DeepspeedAutoValues, label: str) -> FilledDeepspeedConfig:
    """`given` without "auto", and what is wrong with it; `label` is how the user named the file."""
    config = without_switched_off_keys(json.loads(json.dumps(given)))
    zero = config.setdefault("zero_optimization", {})
    problems = [
        *unserved_key_problems(config, zero, label),
        *_numbers(config, facts, label),
        *_precision(config, facts, label),
        *_optimizer(config, facts, label),
    ]
    for name, size in _sizes(facts).items():
        if zero.get(name) == "auto":
            zero.pop(name) if size is None else zero.update({name: size})
    config.pop("hostfile", None)  # of the launcher
    for path in _autos(config):
        problems.append(
            Problem(f'{label}: "{path}": "auto"', "the run does not provide this value", "set a value, or leave it out")
        )
    kind = matching_deepspeed_preset(config)
    if kind is None and not problems:
        fix = "see the examples in configs/deepspeed"
        problems.append(
            Problem(
                f'{label}: "stage": {zero.get("stage")}', f"with this offload is not one of {', '.join(KINDS)}", fix
            )
        )
    return FilledDeepspeedConfig(kind or "zero0", config, tuple(problems))


def _sizes(facts: DeepspeedAutoValues) -> dict[str, int | None]:
    """Bucket sizes in elements for "auto", by the hidden size h: one h x h matrix a bucket, norms and biases stay
    whole."""
    h = facts.hidden_size
    square = None if h is None else h * h
    return {
        "reduce_bucket_size": square,
        "allgather_bucket_size": square,
        "stage3_prefetch_bucket_size": None if square is None else square * 9 // 10,
        "stage3_param_persistence_threshold": None if h is None else 10 * h,
    }


def _numbers(config: dict[str, Any], facts: DeepspeedAutoValues, label: str) -> Iterator[Problem]:
    rows = facts.per_device * facts.accumulation
    yield from _agree(config, "train_batch_size", facts.world and rows * facts.world, "--global_batch_size", label)
    yield from _agree(
        config, "train_micro_batch_size_per_gpu", facts.per_device, "--per_device_train_batch_size", label
    )
    yield from _agree(config, "gradient_accumulation_steps", facts.accumulation, "--gradient_accumulation_steps", label)
    yield from _agree(config, "gradient_clipping", facts.clip, "--max_grad_norm", label)


def _agree(section: dict[str, Any], name: str, value: Any, flag: str, label: str) -> Iterator[Problem]:
    """Fills in `name`, or tells that it says something else than the run."""
    value_in_file = section.get(name)
    if value_in_file == "auto":
        section.pop(name) if value is None else section.update({name: value})
    elif value_in_file is not None and value is not None and not _same(value_in_file, value):
        shown = value_in_file if isinstance(value_in_file, list) else [value_in_file]
        shown = [2**number for number in shown] if name == "initial_scale_power" else shown
        typed = " ".join(f"{option} {number}" for option, number in zip(flag.split(), shown, strict=False))
        yield Problem(
            f'{label}: "{name}": {value_in_file}',
            f"conflicts with the run, which uses {value}",
            f'{typed}, or "auto" in the file',
        )


def _same(value_in_file: Any, value: Any) -> bool:
    pairs = (
        list(zip(value_in_file, value, strict=False)) if isinstance(value_in_file, list) else [(value_in_file, value)]
    )
    return all(isinstance(a, int | float) and math.isclose(a, b, rel_tol=1e-9) for a, b in pairs)


def _precision(config: dict[str, Any], facts: DeepspeedAutoValues, label: str) -> Iterator[Problem]:
    for name, dtype in PRECISIONS.items():
        section = config.setdefault(name, {})
        enabled = section.setdefault("enabled", "auto" if name == "bf16" or facts.dtype == dtype else False)
        if enabled == "auto":
            section["enabled"] = facts.dtype == dtype
        elif bool(enabled) != (facts.dtype == dtype):
            yield Problem(
                f'{label}: "{name}": {{"enabled": {json.dumps(enabled)}}}',
                f"conflicts with the compute dtype {facts.dtype}",
                f'--torch_dtype {dtype if enabled else "float32"}, or "auto" in the file',
            )
    if config["fp16"]["enabled"]:
        yield from _loss_scale(config["fp16"], facts.loss_scale, label)
    else:
        config.pop("fp16")


def _loss_scale(section: dict[str, Any], own: LossScaleNumbers, label: str) -> Iterator[Problem]:
    for name, only in FP16_ONLY.items():
        if section.pop(name, only) != only:
            yield Problem(f'{label}: "fp16": "{name}"', "is not supported: the loss scale is dynamic", "leave it out")
    section.pop("auto_cast", None)  # inputs are always cast
    for name, flag in LOSS_SCALE_OPTIONS.items():
        section.setdefault(name, "auto")
        yield from _agree(section, name, getattr(own, name), flag, label)


def _optimizer(config: dict[str, Any], facts: DeepspeedAutoValues, label: str) -> Iterator[Problem]:
    """Optimizer and schedule are the run's; the file's are compared and then left out."""
    # The optimizer: only AdamW, with the run's own numbers.
    section = config.pop("optimizer", None) or {}
    params = dict(section.get("params") or {})
    if (kind := section.get("type", "AdamW")) not in ("Adam", "AdamW", "auto") or params.get("adam_w_mode") is False:
        yield Problem(
            f'{label}: "optimizer": "{kind}"',
            "is not supported: ZeRO runs always use AdamW",
            '"AdamW", or leave the section out',
        )
        params.pop("adam_w_mode", None)
    names = {
        "lr": (facts.learning_rate, "--learning_rate"),
        "betas": (facts.betas, "--adam_beta1 --adam_beta2"),
        "eps": (facts.epsilon, "--adam_epsilon"),
        "weight_decay": (facts.weight_decay, "--weight_decay"),
    }
    yield from _compared(params, names, label)
    # The schedule: the same kind as the run's.
    section = config.pop("scheduler", None) or {}
    kind = section.get("type")
    params = dict(section.get("params") or {})
    if kind is not None and SCHEDULES.get(kind) != facts.schedule:
        fix = f"--lr_scheduler_type {SCHEDULES[kind]}" if kind in SCHEDULES else "--lr_scheduler_type"
        yield Problem(
            f'{label}: "scheduler": "{kind}"',
            f"the schedule of the run is {facts.schedule}",
            f"{fix}, or leave the section out",
        )
        return
    # Its numbers; ratios are of the learning rate.
    rate = facts.learning_rate
    for ratio, name in (("warmup_min_ratio", "warmup_min_lr"), ("cos_min_ratio", "min_lr")):
        if ratio in params:
            value = params.pop(ratio)
            params[name] = value * rate if isinstance(value, int | float) else value
    names = {
        "warmup_min_lr": (facts.warmup_init, "--lr_warmup_init"),
        "warmup_max_lr": (rate, "--learning_rate"),
        "min_lr": (facts.min_lr, "--min_lr"),
        "warmup_num_steps": (None, "--warmup_steps"),
    }
    yield from _compared(params, names, label)


def _compared(params: dict[str, Any], names: Mapping[str, tuple[Any, str]], label: str) -> Iterator[Problem]:
    """Parameters that say something else than the run, and those that would be ignored."""
    for name in list(params):
        if name in names:
            yield from _agree(params, name, *names[name], label)
        elif name not in IDLE_PARAMS or IDLE_PARAMS[name] not in (None, params[name]):
            fix = did_you_mean_hint(name, [*names, *IDLE_PARAMS]) or "leave it out"
            yield Problem(f'{label}: "{name}": {json.dumps(params[name])}', "would be ignored", fix)


def _autos(node: Any, path: str = "") -> Iterator[str]:
    """Where "auto" is still written."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _autos(value, f"{path}{key}.")
        elif value == "auto":
            yield path + key
