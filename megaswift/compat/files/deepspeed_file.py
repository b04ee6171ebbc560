"""Options that a DeepSpeed file sets: its optimizer, schedule, batch, precision and hosts count where the run says
nothing.

Owns the translation of values. Which keys are served at all, and comparing a file with its run, is
`engine/options/zero_file.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megaswift.compat.names.translated import RENAMED
from megaswift.config.sections import NAMES
from megaswift.engine.options.engine import ZERO
from megaswift.engine.options.zero_file import (
    LOSS_SCALE_OPTIONS,
    PRECISIONS,
    SCHEDULES,
    deepspeed_json_text,
    deepspeed_label,
    read_deepspeed_json,
)
from megaswift.errors import ConfigError
from megaswift.options.sources import ConfigSource, GivenOptionValue

_BATCH = {"train_batch_size": "global_batch_size"} | {
    key: RENAMED.get(key, key)
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
}
_OPTIMIZER = {"lr": "learning_rate", "eps": "adam_epsilon", "weight_decay": "weight_decay"}
HOSTFILE = "hostfile"
LARGEST_POWER = 128
"""The largest power of two in float32, in which losses are scaled."""
LINEAR_WARMUP = "its warmup is linear here (DeepSpeed's default: logarithmic; warmup_type linear in the file)"


def source_from_deepspeed_file(sources: Sequence[ConfigSource]) -> ConfigSource:
    """What the file of the last `--deepspeed` says, as a source of its own; empty without a readable file, which the
    rules report."""
    named, config = _last_deepspeed_settings(sources)
    file = deepspeed_label(named)
    givens = [
        GivenOptionValue(name, v, f'{file}: "{key}": {v}', f'{file}: "{key}":') for key, name, v in _options(config)
    ]
    return ConfigSource(tuple(givens), notices=tuple(_notices(config, file)), compared=True)


def hostfile_of_deepspeed_file(sources: Sequence[ConfigSource]) -> GivenOptionValue | None:
    """The key `hostfile` of the last `--deepspeed` as the option; None without one.

    A relative path is looked up beside the JSON file, else in the working folder.
    """
    named, config = _last_deepspeed_settings(sources)
    hosts = config.get(HOSTFILE)
    if not isinstance(hosts, str) or not hosts:
        return None
    label = f'{deepspeed_label(named)}: "{HOSTFILE}": {hosts}'
    beside = Path(named).expanduser().parent / hosts
    is_beside = not named.lstrip().startswith("{") and beside.is_file()
    return GivenOptionValue(HOSTFILE, str(beside) if is_beside else hosts, label, label)


def _last_deepspeed_settings(sources: Sequence[ConfigSource]) -> tuple[str, Mapping[str, Any]]:
    """(file or JSON, its object) of the last `--deepspeed`; ("", {}) where it names neither."""
    named = [g.value for s in sources for g in s.givens if "deepspeed" in (NAMES.get(g.name), RENAMED.get(g.name))]
    value = named[-1] if named else None
    if isinstance(value, Mapping):
        value = value["config_path"] if "config_path" in value else deepspeed_json_text(value)
    if not isinstance(value, str) or value in ZERO:
        return "", {}
    try:
        return value, read_deepspeed_json(value)
    except (ConfigError, OSError):
        return "", {}


def _options(config: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(key of the file, option, value) for every value that is not "auto"."""
    for key, name in _BATCH.items():
        if _is_number(config.get(key)):
            yield key, name, config[key]
    optimizer, schedule = (_params(config, part) for part in ("optimizer", "scheduler"))
    if _is_number(schedule.get("warmup_max_lr")):  # the schedule's peak is what DeepSpeed trains with
        optimizer["lr"] = schedule["warmup_max_lr"]
    for key, name in _OPTIMIZER.items():
        if _is_number(optimizer.get(key)):
            yield key, name, optimizer[key]
    betas = optimizer.get("betas")
    if isinstance(betas, list) and len(betas) == 2 and all(map(_is_number, betas)):
        yield from (("betas", f"adam_beta{i}", beta) for i, beta in enumerate(betas, 1))
    kind = _section(config, "scheduler").get("type")
    if isinstance(kind, str) and kind in SCHEDULES:
        yield "scheduler", "lr_scheduler_type", SCHEDULES[kind]
    yield from _schedule_numbers(schedule, optimizer.get("lr"))
    for name, dtype in PRECISIONS.items():
        if _section(config, name).get("enabled") is True:
            yield name, "torch_dtype", dtype
    half = _section(config, "fp16")
    if half.get("enabled", False) is not False:
        for key, flag in LOSS_SCALE_OPTIONS.items():
            if _is_number(half.get(key)):
                power = key == "initial_scale_power" and abs(half[key]) < LARGEST_POWER
                yield key, flag.removeprefix("--"), 2.0 ** half[key] if power else half[key]


def _schedule_numbers(schedule: Mapping[str, Any], rate: Any) -> Iterator[tuple[str, str, Any]]:
    """Warmup, and where the schedule ends; ratios are of the peak, of the file or else of the run."""
    if _is_number(schedule.get("warmup_num_steps")):
        yield "warmup_num_steps", RENAMED["warmup_num_steps"], int(schedule["warmup_num_steps"])
    if _is_number(schedule.get("warmup_min_lr")):
        yield "warmup_min_lr", RENAMED["warmup_min_lr"], schedule["warmup_min_lr"]
    for key, name in (("warmup_min_ratio", "lr_warmup_init"), ("cos_min_ratio", "min_lr")):
        if _is_number(schedule.get(key)) and _is_number(rate):
            yield key, name, schedule[key] * rate
        elif _is_number(schedule.get(key)) and schedule[key] > 0:
            yield key, f"{name}_ratio", schedule[key]


def _notices(config: Mapping[str, Any], file: str) -> Iterator[str]:
    schedule = _params(config, "scheduler")
    if schedule.get("warmup_num_steps") and schedule.get("warmup_type", "log") == "log":
        yield f"{file}: {LINEAR_WARMUP}"
    if _is_number(schedule.get("total_num_steps")):
        yield f'{file}: "total_num_steps" is not used: the schedule ends with the run (--max_steps)'


def _params(config: Mapping[str, Any], part: str) -> dict[str, Any]:
    params = _section(config, part).get("params")
    return dict(params) if isinstance(params, Mapping) else {}


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
