"""Files of a model and of a checkpoint are read once for all ranks of a torch engine, and give the values they hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.torch.strategies.test_zero import PRELOAD
from tests.engine.torch.weight_reading_ranks import Loading
from tests.parity.models import build
from tests.parity.pool import Pool, shared

pytestmark = pytest.mark.process
RANKS = "tests.engine.torch.weight_reading_ranks:"


@pytest.fixture(scope="module")
def zero_pool() -> Iterator[Pool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        with Pool((*PRELOAD, "megaswift.engine.torch.engine")) as started:
            yield started


def check(pool: Pool, engine: str, model: str, world: int, tmp_path: Path) -> None:
    """All ranks together read each tensor once, none more than its share; every rank has all weights, bit for bit."""
    folder = build(model, tmp_path / model)
    want = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    whole = sum(tensor.nbytes for tensor in want.values())
    ranks = pool.run(RANKS + "load", Loading(folder, engine, tmp_path / "step"), world, timeout=240)
    for taken in ([model for model, _, _ in ranks], [step for _, step, _ in ranks]):
        assert sum(taken) == whole and max(taken) < 0.8 * whole
    found = ranks[0][2]
    assert set(found) == set(want) and all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.parametrize(("engine", "model"), [("ddp", "dense"), ("fsdp2", "moe")])
def test_ranks_share_the_reading(engine: str, model: str, tmp_path: Path) -> None:
    check(shared(""), engine, model, 3, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"])
def test_ranks_of_zero_share_it_too(engine: str, zero_pool: Pool, tmp_path: Path) -> None:
    check(zero_pool, engine, "moe", 2, tmp_path)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_rank_that_cannot_read_ends_the_run_on_all(engine: str, tmp_path: Path) -> None:
    errors = shared("").run(RANKS + "fail", Loading(build("dense", tmp_path / "dense"), engine), 2)
    assert errors[0] == errors[1] and "cannot be read" in errors[0]


def test_one_process_reads_with_transformers(tmp_path: Path) -> None:
    """There is nobody to share with."""
    ((read, _, found),) = shared("").run(RANKS + "load", Loading(build("dense", tmp_path / "dense"), "ddp"), 1)
    assert read == 0 and found
