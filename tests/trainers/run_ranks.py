"""What rank processes of tests.parity.pool do for tests of whole runs: a run as users start it, and a look at its
engine."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Job:
    """A command line after `megaswift sft`, and variables of the environment."""

    words: list[str]
    environ: dict[str, str] = field(default_factory=dict)


@dataclass
class Seen:
    """The engine of a rank after its last step, not by its own word."""

    wrapper: str
    """What is called in place of the model."""
    optimizer: str = ""
    stage: int = -1
    mesh: tuple[int, ...] = ()
    """Ranks of an FSDP unit by dimension."""
    units: tuple[str, ...] = ()
    """Classes of FSDP's units, but for the whole."""
    keeps: bool = False
    """Whether an FSDP unit stays whole after its forward pass."""
    offloads: bool = False
    local: int = 0
    """Elements of weights on this rank."""
    states: int = 0
    """Elements of optimizer states on this rank."""


def go(rank: int, world: int, job: Job) -> Seen | None:
    """The run; None on the native engine."""
    os.environ.update(job.environ)
    from megaswift.config import load_config
    from megaswift.run import course
    from megaswift.run.checks.engine_choice import resolve_engine
    from megaswift.run.training import preflight, run_training

    found: list[Seen | None] = []

    train_or_skip = course.train_or_skip

    def watched(run: Any, *rest: Any) -> None:
        """Looks at the engine when the loop is done."""
        train_or_skip(run, *rest)
        found.append(look(run.engine) if hasattr(run.engine, "strategy") else None)

    course.train_or_skip = watched  # this process ends with the job
    cfg = resolve_engine(load_config("sft", job.words, complete=True), world)
    preflight(cfg, world)
    run_training(cfg)
    return found[0]


def look(engine: Any) -> Seen:
    """The wrapper, and what this rank holds, from the tensors themselves."""
    strategy, module = engine.strategy, engine.strategy.module
    seen = Seen(type(module).__name__, local=sum(local(p).numel() for p in engine.fields.parameters()))
    if hasattr(module, "zero_optimization_stage"):
        seen.stage, seen.optimizer = module.zero_optimization_stage(), type(module.optimizer).__name__
        zero = module.optimizer
        seen.offloads = bool(getattr(zero, "offload_optimizer", getattr(zero, "cpu_offload", False)))
    else:
        seen.optimizer = type(strategy.optimizer.inner).__name__
    seen.states = sum(t.numel() for t in optimizer_tensors(strategy))
    units = [m for m in module.modules() if hasattr(m, "set_reshard_after_forward")]
    if units:
        seen.units = tuple(sorted({type(m).__name__.removeprefix("FSDP") for m in units if m is not module}))
        group = units[0]._get_fsdp_state()._fsdp_param_group
        seen.keeps = group.post_forward_mesh_info is None
        seen.offloads = type(group.offload_policy).__name__ == "CPUOffloadPolicy"
        seen.mesh = tuple(next(iter(units[-1].parameters())).device_mesh.shape)
    return seen


def local(parameter: nn.Parameter) -> Tensor:
    """The part of a parameter that lies on this rank."""
    if hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor if parameter.ds_tensor.numel() else parameter.data
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter.data


def optimizer_tensors(strategy: Any) -> list[Tensor]:
    """The optimizer's states on this rank, but for counts of steps."""
    inner = strategy.optimizer.inner if hasattr(strategy, "optimizer") else strategy._inner
    inner = getattr(inner, "inner", inner)
    states = [t for state in inner.state.values() for t in state.values() if isinstance(t, torch.Tensor) and t.dim()]
    return [t.to_local() if hasattr(t, "to_local") else t for t in states]
