"""DDP adds gradients up over ranks once a step, however many micro-batches it has.

Covers: megaswift/engine/torch/strategies/ddp.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.parity import models
from tests.parity.cases import Case, global_batch, own, parse
from tests.parity.pool import Pool


@dataclass(frozen=True)
class Task:
    """A case, and how many micro-batches a rank takes."""

    case: Case
    model: Path
    microbatches: int


def reductions(rank: int, world: int, task: Task) -> int:
    """Count the reductions of gradients in a step (on a rank)."""
    import torch
    import torch.distributed as dist

    from megaswift.losses.sft import CrossEntropy
    from tests.parity.measure import build

    engine: Any
    engine, context = build(task.case, task.model, world, engine="ddp")
    seen: list[int] = []

    def counting(state: Any, bucket: Any) -> Any:
        seen.append(bucket.index())
        dist.all_reduce(bucket.buffer().div_(world))
        done: Any = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    counting.__annotations__ = {}  # torch compares them with its own types
    engine.strategy.module.register_comm_hook(None, counting)
    mine = own(global_batch(task.case, 0), task.case.dp, context.layout.coordinates(rank).dp)
    engine.train_batch([*mine, *mine][: task.microbatches], CrossEntropy(), 1e-3)
    context.close()
    return len(seen)


@pytest.mark.process
def test_gradients_are_reduced_once_a_step(tmp_path: Path, pool: Pool) -> None:
    model = models.build("dense", tmp_path / "model")
    counts = [pool.run(f"{__name__}:reductions", Task(parse("dense dp2"), model, n), 2) for n in (1, 3)]
    assert counts[0] == counts[1] and counts[0][0] > 0
