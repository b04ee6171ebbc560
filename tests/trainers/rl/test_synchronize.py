"""Weight syncs whose samplers stop early or fail: no other rank is left waiting, and all ranks have the error.

Covers: megaswift/trainers/rl/generation.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from megaswift.engine.protocol import Receivers
from megaswift.errors import Problem, UserError
from megaswift.rollout.sampler import SamplingParams
from tests.parity.cases import parse
from tests.parity.models import build
from tests.parity.pool import shared


@dataclass(frozen=True)
class Sync:
    """Who gets weights, and what rank 1's sampler (of one receiver: rank 0's) does behind the first tensor."""

    folder: Path
    to: Receivers
    fault: str


def job(rank: int, world: int, run: Sync) -> tuple[int, int, str]:
    """(Tensors that this rank's sampler has taken in a sync with the fault and in the next one, the error)."""
    from megaswift.engine import buckets
    from megaswift.trainers.rl.generation import CompletionGenerator
    from tests.parity.measure import build as build_engine

    buckets.HOST_BUCKET = 20_000
    engine, context = build_engine(parse("dense tp2"), run.folder, world)
    faulty = rank == (0 if run.to == "rank0" else 1)
    taken = [0]

    def take(weights: Iterable[tuple[str, Tensor]]) -> None:
        for _ in weights:
            taken[-1] += 1
            if faulty and len(taken) == 1 and run.fault == "fails":
                raise UserError(Problem("the sampler", "has failed"))
            if faulty and len(taken) == 1 and run.fault == "stops":
                return

    sampler: Any = SimpleNamespace(update_weights=take)
    made = CompletionGenerator(engine, context.coordinates, sampler, SamplingParams(1), 0, receivers=run.to)
    error = ""
    try:
        made.synchronize()
    except UserError as raised:
        error = raised.message()
    taken.append(0)
    made.synchronize()
    dist.barrier()
    context.close()
    return taken[0], taken[1], error


@pytest.mark.process
@pytest.mark.parametrize("to", ["all", pytest.param("rank0", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", ["fails", pytest.param("stops", marks=pytest.mark.slow)])
def test_a_sampler_that_does_not_take_all_weights_holds_nobody(to: Receivers, fault: str, tmp_path: Path) -> None:
    """The stream has several buckets, which all ranks exchange; the next sync is whole."""
    folder = build("dense", tmp_path / "model")
    found = shared("").run("tests.trainers.rl.test_synchronize:job", Sync(folder, to, fault), 2, timeout=60.0)
    faulty, other = (0, 1) if to == "rank0" else (1, 0)
    whole = found[faulty][1]
    assert found[faulty][0] == 1 and whole > 30
    assert found[other][:2] == ((0, 0) if to == "rank0" else (whole, whole))
    assert [("has failed" in error) == (fault == "fails") for _, _, error in found] == [True, True]
