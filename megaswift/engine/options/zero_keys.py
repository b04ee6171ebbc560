"""Which keys of a DeepSpeed file the torch engines serve, and what to do instead of the others.

Owns the tables, older spellings of keys, and what may be dropped because it is switched off. Comparing a file's values
with its run is `zero_file.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megaswift.errors import Problem, did_you_mean_hint

SERVED = (
    "zero_optimization",
    "bf16",
    "fp16",
    "data_types",
    "communication_data_type",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "steps_per_print",
    "wall_clock_breakdown",
    "flops_profiler",
    "comms_logger",
    "memory_breakdown",
    "dump_state",
    "log_level",
    "disable_python_gc",
    "aio",
    "hostfile",
)
"""Sections and keys that have an effect, or repeat what the run says."""

INSTEAD = {
    "amp": "bf16",
    "torch_autocast": "bf16",
    "activation_checkpointing": "--recompute_granularity full, and leave the section out",
    "tensorboard": "--report_to tensorboard",
    "wandb": "--report_to wandb",
    "pipeline": "use --engine megatron with --pp",
    "tensor_parallel": "use --engine megatron with --tp",
    "sequence_parallel_size": "use --engine megatron with --cp",
    "prescale_gradients": "leave it out: gradients are summed, then divided once",
    "gradient_predivide_factor": "leave it out: gradients are summed, then divided once",
    "gradient_allreduce_op": "leave it out: gradients are summed, then divided once",
}
"""What does the work of a key that is not served."""

SWITCHED_OFF = {"gradient_predivide_factor": 1, "sequence_parallel_size": 1}
"""Numbers of keys that are not served with which they ask for nothing."""

NOT_SERVED = {
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
    "zero_hpz_partition_size": 1,
    "mics_shard_size": -1,
    "zenflow": None,
    "compute_grad_norm": True,
    "round_robin_gradients": False,
}
"""Keys of `zero_optimization` that change numbers or the layout that checkpoints read, with the only value that
goes."""

DEVICES = ("none", "cpu", "nvme")
OFFLOADS = {"optimizer": "cpu_offload", "param": "cpu_offload_params"}
"""Part that is offloaded: its switch in files of older versions."""
READ_AHEAD_ON_A_DRIVE = ("stage3_prefetch_bucket_size", "stage3_max_reuse_distance")
"""Keys of `zero_optimization` that are 0 with weights on a drive: weights that are read ahead or kept for a later use
hold buffers, of which DeepSpeed 0.19.8 does not count the free ones, and a step would fail."""
STATES_OF_A_STEP = 4
"""Weight, gradient and two moments: DeepSpeed's default for the `buffer_count` of an optimizer on a drive."""


def without_switched_off_keys(config: dict[str, Any]) -> dict[str, Any]:
    """A file's object without keys that are not served and ask for nothing, and with today's spelling of offloads."""
    kept = {name: value for name, value in config.items() if name in SERVED or not _asks_for_nothing(name, value)}
    zero = kept.get("zero_optimization")
    if isinstance(zero, dict):
        kept["zero_optimization"] = zero = dict(zero)
        pinned = zero.pop("cpu_offload_use_pin_memory", None)
        for part, older in OFFLOADS.items():
            if zero.pop(older, False) is True:
                zero.setdefault(f"offload_{part}", {"device": "cpu", **({"pin_memory": True} if pinned else {})})
    return kept


def _asks_for_nothing(name: str, value: Any) -> bool:
    if isinstance(value, Mapping):
        return not any(value.values()) if "enabled" not in value else not value["enabled"]
    return not value or SWITCHED_OFF.get(name) == value


def unserved_key_problems(config: Mapping[str, Any], zero: Mapping[str, Any], label: str) -> Iterator[Problem]:
    """Keys that would be ignored, or would change what a run relies on."""
    for name in config:
        if name not in SERVED:
            fix = INSTEAD.get(name) or did_you_mean_hint(name, SERVED) or "leave it out"
            yield Problem(f'{label}: "{name}"', "would be ignored: torch engines do not support it", fix)
    if not isinstance(config.get("hostfile", ""), str):
        yield Problem(f'{label}: "hostfile": {json.dumps(config["hostfile"])}', "is not a path", '"hostfile": "hosts"')
    for name, only in NOT_SERVED.items():
        if name in zero and zero[name] != only:
            rule = "is not supported: it changes results, or the layout that checkpoints rely on"
            yield Problem(f'{label}: "{name}": {zero[name]}', rule, "leave it out")
    for part in OFFLOADS:
        yield from _offload_problems(part, zero.get(f"offload_{part}") or {}, zero.get("stage", 0), label)
    if (config.get("aio") or {}).get("use_gds") and offload_parts_on_a_drive(config):
        rule = "is not supported: shards on a drive are read and written through host memory"
        yield Problem(f'{label}: "aio": "use_gds": true', rule, "leave it out")


def offload_parts_on_a_drive(config: Mapping[str, Any]) -> list[str]:
    """Which of "optimizer" and "param" a configuration keeps in files."""
    zero = config.get("zero_optimization") or {}
    return [part for part in OFFLOADS if (zero.get(f"offload_{part}") or {}).get("device") == "nvme"]


def _offload_problems(part: str, section: Mapping[str, Any], stage: Any, label: str) -> Iterator[Problem]:
    device = section.get("device", "none")
    where = f'{label}: "offload_{part}": "device": {json.dumps(device)}'
    if device not in DEVICES:
        yield Problem(where, f"is not a device; these are {', '.join(DEVICES)}", '"cpu"')
    elif device == "nvme" and stage != 3:
        yield Problem(where, "needs stage 3", '"stage": 3, or "device": "cpu"')
    elif device == "nvme":
        yield from _drive_problems(part, section, f'{label}: "offload_{part}": ')


def _drive_problems(part: str, section: Mapping[str, Any], where: str) -> Iterator[Problem]:
    """With "fast_init" of DeepSpeed 0.19.8, a run starts from other weights than the model's, without an error."""
    if not section.get("nvme_path"):
        yield Problem(f'{where}"device": "nvme"', "needs a folder on the drive", '"nvme_path": "/local_nvme"')
    if section.get("fast_init"):
        yield Problem(f'{where}"fast_init": true', "is not supported: it starts from wrong weights", "leave it out")
    count = section.get("buffer_count", STATES_OF_A_STEP)
    at_a_time = 1
    at_a_time += sum(bool(section.get(name)) for name in ("pipeline_read", "pipeline_write"))
    least = STATES_OF_A_STEP * at_a_time
    if part == "optimizer" and count < least:
        groups = "a group" if at_a_time == 1 else f"{at_a_time} groups"
        rule = f"is too few: weights, gradients and two moments of {groups} of parameters are in memory at a time"
        yield Problem(f'{where}"buffer_count": {count}', rule, f'"buffer_count": {least}')
