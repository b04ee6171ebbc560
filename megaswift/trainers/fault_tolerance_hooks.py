"""The hooks of section `fault_tolerance`, in the order in which they run within a step."""

from __future__ import annotations

from megaswift.config.fault_tolerance import FaultToleranceConfig
from megaswift.trainers.checkpoint_hook import CheckpointHook
from megaswift.trainers.gpu_health import GpuHealthHook
from megaswift.trainers.hook import Hook
from megaswift.trainers.preemption_notice import PreemptionNoticeHook
from megaswift.trainers.replica_check import ReplicaCheckHook
from megaswift.trainers.straggler import StragglerHook


def fault_tolerance_hooks(options: FaultToleranceConfig, checkpoint: CheckpointHook) -> list[Hook]:
    """Those that are asked for. They stand before `checkpoint`, which saves no state that one of them refuses."""
    hooks: list[Hook] = []
    if options.log_straggler:
        hooks.append(StragglerHook(options.straggler_ratio))
    if options.preemption_command:
        hooks.append(PreemptionNoticeHook(options.preemption_command, options.preemption_interval))
    if options.gpu_health_interval:
        hooks.append(GpuHealthHook(options.gpu_health_interval))
    if options.check_replicas_interval:
        replicas = ReplicaCheckHook(options.check_replicas_interval)
        checkpoint.before_save = replicas.check
        hooks.append(replicas)
    return hooks
