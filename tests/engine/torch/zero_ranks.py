"""What the rank processes of the ZeRO tests do (tests.parity.pool starts them)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megaswift.engine.options.optimizer import OptimConfig
from megaswift.engine.options.zero_file import DeepspeedAutoValues, deepspeed_preset, fill_deepspeed_auto
from megaswift.engine.torch.meta_init import swap_parameters_for_expanded_zeros
from megaswift.engine.torch.optim.loss_scale import DynamicLossScale, make_loss_scale
from megaswift.engine.torch.strategies.strategy import whole_tensor
from megaswift.engine.torch.strategies.zero import ZeroStrategy
from tests.engine.torch.zero_model import HIDDEN, Fields, count, rows

OPTIM = OptimConfig(learning_rate=1e-3, adam_epsilon=1e-6, loss_scale_window=2, hysteresis=1, initial_loss_scale=2**10)
"""The loss scale of float16 changes at every kind of step of these tests."""


def facts(world: int, dtype: str = "float32") -> DeepspeedAutoValues:
    return DeepspeedAutoValues(2, 1, world, 1e-3, 0.0, 0.0, (0.9, 0.95), 1e-6, 0.1, 0.5, "cosine", dtype, HIDDEN)


def loss_scale(dtype: str) -> DynamicLossScale | None:
    return make_loss_scale(getattr(torch, dtype), OPTIM)


def started(kind: str, world: int, dtype: str = "float32", frozen: tuple[str, ...] = ()) -> Any:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    module = Fields(frozen)
    if kind in ("ddp", "fsdp2"):
        return of_torch(kind, module, dtype)
    filled = fill_deepspeed_auto(deepspeed_preset(kind), facts(world, dtype), "preset")
    assert not filled.problems, filled.problems
    return ZeroStrategy(module, OPTIM, filled.config, torch.device("cpu"), loss_scale(dtype))


def of_torch(kind: str, module: Fields, dtype: str) -> Any:
    from megaswift.engine.torch.strategies.ddp import DdpStrategy
    from megaswift.engine.torch.strategies.fsdp import FsdpOptions, FsdpStrategy

    size = SimpleNamespace(world_size=dist.get_world_size())
    context: Any = SimpleNamespace(layout=size, device=torch.device("cpu"), rank=dist.get_rank())
    if kind == "ddp":
        return DdpStrategy(module, OPTIM, context, loss_scale(dtype))
    options = FsdpOptions(frozenset({"Qwen3DecoderLayer"}), param_dtype=getattr(torch, dtype))
    return FsdpStrategy(module, OPTIM, context, options, loss_scale(dtype))


def sharded(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """A hollow model, partitioned and then filled tensor by tensor, and a step."""
    dist.init_process_group("gloo")
    config = fill_deepspeed_auto(deepspeed_preset(job["kind"]), facts(world, job["dtype"]), "preset").config
    module = Fields()
    whole = swap_parameters_for_expanded_zeros(module)
    strategy = ZeroStrategy(module, OPTIM, config, torch.device("cpu"), loss_scale(job["dtype"]))
    held = sum(p.numel() for p in module.parameters())
    for name, tensor in whole.items():
        strategy.put(name, "weight", tensor)
    passes(strategy, 0, rank, world, job)
    gradients = everything(strategy, "gradient")["gradient"]
    strategy.step(1e-3, replace(OPTIM, max_grad_norm=job["clip"]), lambda found: [float(t) for t in found])
    return {
        "held": held,
        "shards": strategy.sizes()[1],
        "gradients": gradients,
        "final": everything(strategy, "weight")["weight"],
    }


def passes(strategy: Any, step: int, rank: int, world: int, job: dict[str, Any]) -> None:
    """Forward and backward of one step's micro-batches on this rank."""
    micro = job["micro"]
    batches = rows(step, world, micro)
    for m, r in enumerate(batches[rank]):
        extra = job["uses"][step * micro + m] if job.get("uses") else True
        with torch.autocast("cpu", torch.float16, enabled=strategy.kind == "ddp"):  # as the engine does
            fields = strategy.module(r.ids, r.labels, extra)
        loss = -(fields * r.weights).sum() / count(batches)
        strategy.backward(
            loss * float("inf") if step in job.get("broken", ()) and rank == 0 and m == 0 else loss, last=m == micro - 1
        )


def everything(strategy: Any, *kinds: str) -> dict[str, dict[str, torch.Tensor]]:
    names, trained = [n for n, _ in Fields().named_parameters()], set(strategy.trained())
    return {
        kind: {n: whole_tensor(strategy, n, kind).clone() for n in names if n in trained or kind == "weight"}
        for kind in kinds
    }


def train(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Some steps; every step's norm and gradients, and the weights and moments at the end."""
    strategy = started(job["kind"], world, job.get("dtype", "float32"))
    norms, taken, gradients, states, scales = [], [], [], [], []
    for step in range(job["steps"]):
        if job.get("abandons"):
            passes(strategy, 5, rank, world, {"micro": 1})
        strategy.zero_grad()
        passes(strategy, step, rank, world, job)
        gradients.append(everything(strategy, "gradient")["gradient"])
        sizes = strategy.sizes()
        norm, done = strategy.step(
            1e-3, replace(OPTIM, max_grad_norm=job["clip"]), lambda found: [float(t) for t in found]
        )
        norms.append(norm)
        taken.append(done)
        scales.append(strategy.loss_scale and strategy.loss_scale.value)
        if job.get("states"):
            states.append(everything(strategy, "weight", "exp_avg", "exp_avg_sq"))
    return {
        "norms": norms,
        "taken": taken,
        "gradients": gradients if rank == 0 else None,
        "states": states,
        "scales": scales,
        "sizes": sizes,
        "final": everything(strategy, "weight", "exp_avg", "exp_avg_sq"),
        "steps": strategy.steps,
        "held": held(strategy),
        "optimizer": type(getattr(strategy.module, "optimizer", None)).__name__,
    }


def held(strategy: Any) -> int:
    """Weights in this rank's module, in elements, counted apart from `sizes`."""
    return sum(p.numel() for p in strategy.module.parameters())


def round_trip(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Writes random weights and moments, reads them back, steps once; the same for a job that resumes from what it
    read."""
    strategy = started(job["kind"], world, job.get("dtype", "float32"), job.get("frozen", ()))
    for kind, tensors in job["state"].items():
        for name, tensor in tensors.items():
            if kind == "weight" or name in set(strategy.trained()):
                strategy.put(name, kind, tensor)
    strategy.steps = 7
    read = everything(strategy, "weight", "exp_avg", "exp_avg_sq")
    r = rows(0, world, 1)[0][0]
    strategy.module.eval()
    with torch.no_grad():
        fields = strategy.module(r.ids, r.labels)
    strategy.module.train()
    passes(strategy, 0, rank, world, {"micro": 1})
    strategy.step(1e-3, OPTIM, lambda found: [float(t) for t in found])
    return {"read": read, "fields": fields, "steps": strategy.steps, "after": everything(strategy, "weight")["weight"]}
