"""Tensors that an engine holds after a step, counted on its ranks, beside what `megaswift.memory` computes for them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megaswift.config import SwiftConfig
from megaswift.families import family_of
from megaswift.losses.sft import CrossEntropy
from megaswift.trainers.tensor_memory_holders import GRADIENTS, OPTIMIZER, WEIGHTS, tensor_memory_holders
from tests.parity.cases import global_batch, own, parse
from tests.parity.measure import build


@dataclass(frozen=True)
class CountedRun:
    """A parity case (layout and batches) on a model folder."""

    text: str
    folder: Path
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Held:
    """Bytes of the storages behind weights, gradients and optimizer states."""

    weights: int
    gradients: int
    optimizer: int


def count_held(rank: int, world: int, run: CountedRun) -> Held:
    """After one step, gradients still there (on the ranks)."""
    from megaswift.engine.megatron.layers.nf4_linear import NF4Matrix

    case = parse(run.text)
    engine, context = build(case, run.folder, world, **run.options)
    mine = own(global_batch(case, 2), case.dp, context.layout.coordinates(rank).dp)
    counters = 0
    if hasattr(engine, "plain"):
        assert not engine.train_batch(mine, CrossEntropy(), 1e-3).skipped
        parts = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
        optimizers = [part.optimizer for part in parts if not getattr(part, "is_stub_optimizer", False)]
        modules: list[Any] = engine.plain
    else:
        gradients = 0
        zero = engine.strategy.zero_grad
        engine.train_batch(mine, CrossEntropy(), 1e-3)
        assert zero and not gradients
        engine.accumulate(mine, CrossEntropy())
        optimizers, modules = [getattr(engine.strategy, "optimizer", None)], []
        optimizers = [o.inner for o in optimizers if o is not None]
    for optimizer in optimizers:
        counters += sum(
            t.untyped_storage().nbytes()
            for state in optimizer.state.values()
            for t in state.values()
            if isinstance(t, torch.Tensor) and t.dim() == 0
        )
    nf4 = sum(m.nbytes for c in modules for m in c.modules() if isinstance(m, NF4Matrix))
    found = tensor_memory_holders(torch.device("cpu"))
    held = Held(found.get(WEIGHTS, 0) + nf4, found.get(GRADIENTS, 0), found.get(OPTIMIZER, 0) - counters)
    torch.distributed.barrier()
    context.close()
    return held


def configuration(run: CountedRun) -> tuple[SwiftConfig, Any]:
    """(the run's configuration, its model)."""
    case = parse(run.text)
    config = json.loads((run.folder / "config.json").read_text())
    return SwiftConfig(task="sft", model=str(run.folder), **case.config(**run.options)), family_of(config).spec(config)
