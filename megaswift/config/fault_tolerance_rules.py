"""Rules about section `fault_tolerance`."""

from __future__ import annotations

from megaswift.config.engine_rules import requested_engine
from megaswift.config.rule_types import IgnoredOption, Test

SHARDED = ("fsdp2", "zero3", "zero3_offload")
_SHARDED: Test = lambda c: requested_engine(c) in SHARDED  # noqa: E731

FAULT_TOLERANCE_IGNORED: tuple[IgnoredOption, ...] = (
    IgnoredOption(
        "check_replicas_interval",
        ("engine",),
        _SHARDED,
        "no two ranks hold the same weights: this engine shards them",
        "leave it out, or use --engine megatron, ddp or zero2",
    ),
    IgnoredOption(
        "preemption_interval",
        ("preemption_command",),
        lambda c: c.fault_tolerance.preemption_command is None,
        "needs preemption_command",
        "--preemption_command COMMAND",
    ),
    IgnoredOption(
        "straggler_ratio",
        ("log_straggler",),
        lambda c: not c.fault_tolerance.log_straggler,
        "needs log_straggler",
        "--log_straggler true",
    ),
)
