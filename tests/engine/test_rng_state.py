"""Random states of a rank: written, disturbed, restored, and the same numbers drawn again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megaswift.engine import rng_state as saved
from megaswift.engine.megatron.checkpoint import save_load
from megaswift.engine.megatron.parallel_context import ParallelContext
from megaswift.errors import Problem
from megaswift.parallel.layout import Layout


@pytest.fixture
def context() -> Iterator[ParallelContext]:
    """One rank."""
    made = ParallelContext(Layout(1), seed=3)
    yield made
    made.close()


def draw() -> list[float]:
    """From every generator; Gaussians leave a spare value behind."""
    from megatron.core import tensor_parallel

    found = [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        float(torch.rand(())),
    ]
    tracker = tensor_parallel.get_cuda_rng_tracker()
    for name in sorted(tracker.get_states()):
        with tracker.fork(name):
            found.append(float(torch.rand(())))
    return found


def write_rank_rng(folder: Path) -> None:
    saved.rng_file(folder, 0).write_bytes(save_load.rank_rng_file_content())


def test_a_seed_determines_every_generator(context: ParallelContext) -> None:
    context.seed(3)
    first = draw()
    context.seed(3)
    assert draw() == first
    context.seed(4)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_restored_bit_for_bit(context: ParallelContext, tmp_path: Path) -> None:
    """What came after the save comes again, and the file is safetensors."""
    draw()
    write_rank_rng(tmp_path)
    after = [draw(), draw()]
    states = saved.read_rng_state_file(tmp_path, 0)
    assert not isinstance(states, Problem) and save_load.fits_rank_rng(states[0])
    save_load.restore_rank_rng(*states)
    assert [draw(), draw()] == after
    save_load.restore_rank_rng(*states)
    assert [draw(), draw()] == after
    assert len(after[0]) >= 7


def test_reseed_is_repeatable_and_fresh(context: ParallelContext, tmp_path: Path) -> None:
    """The same file gives the same numbers, another file others, neither those of the saved states."""
    write_rank_rng(tmp_path)
    kept = draw()
    seeds = [save_load.reseed_rank_generators(context, tmp_path)]
    first = draw()
    assert save_load.reseed_rank_generators(context, tmp_path) == seeds[0] and draw() == first
    assert all(a != b for a, b in zip(first, kept, strict=True))
    write_rank_rng(tmp_path)
    assert save_load.reseed_rank_generators(context, tmp_path) != seeds[0]
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_other_generators_do_not_fit(context: ParallelContext, tmp_path: Path) -> None:
    """A checkpoint from a machine with another kind of device."""
    write_rank_rng(tmp_path)
    states = saved.read_rng_state_file(tmp_path, 0)
    assert not isinstance(states, Problem)
    assert not save_load.fits_rank_rng({**states[0], "cuda": torch.zeros(16, dtype=torch.uint8)})


@pytest.mark.parametrize("content", [None, b"", b"\0" * 64])
def test_unreadable(content: bytes | None, context: ParallelContext, tmp_path: Path) -> None:
    """A problem that names the file."""
    if content is not None:
        saved.rng_file(tmp_path, 3).write_bytes(content)
    found = saved.read_rng_state_file(tmp_path, 3)
    assert isinstance(found, Problem) and "rng-00003.safetensors" in found.what
