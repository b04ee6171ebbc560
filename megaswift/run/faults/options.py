"""Section `faults`: what a run watches for while it trains, and what it does then."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.options.option import but_not, is_set, option


@dataclass(frozen=True)
class FaultToleranceConfig:
    """Fault tolerance"""

    oom_retry: bool = option(True, "After out of memory, restart once with a smaller micro-batch")
    auto_find_batch_size: bool = option(
        False,
        "After each out of memory, restart with half the micro-batch",
        only_with={"oom_retry": True},
    )
    check_replicas_interval: int | None = option(
        None,
        "Steps between comparisons of data-parallel replicas' weights; default: never",
        aliases=("check_weight_hash_across_dp_replicas_interval",),
        minimum=1,
        unset=("-1", "0"),
        unit="steps",
        only_with={"engine": but_not("fsdp2", "zero3", "zero3_offload")},
    )
    preemption_command: str | None = option(
        None, "Command polled on each node; exit code 0: the node is about to be preempted", metavar="COMMAND"
    )
    preemption_interval: float = option(
        10.0,
        "Time between two polls of preemption_command",
        above=0,
        unit="seconds",
        only_with={"preemption_command": is_set()},
    )
    gpu_health_interval: int | None = option(
        None, "Steps between checks of the GPUs for hardware errors; default: never", minimum=1, unit="steps"
    )
    log_straggler: bool = option(False, "Name ranks with slow passes or slow input at each log entry")
    straggler_ratio: float = option(
        1.3, "Multiple of the median time from which a rank counts as slow", above=1, only_with={"log_straggler": True}
    )
