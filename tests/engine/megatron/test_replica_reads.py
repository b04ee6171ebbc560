"""Files of a model are read once for all data-parallel replicas, with the values that they hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.parity.cases import Case
from tests.parity.models import build
from tests.parity.pool import shared


@pytest.mark.process
@pytest.mark.parametrize(
    ("case", "world", "copies"),
    [(Case(dp=4), 4, 1), (Case(dp=2, tp=2), 4, 2), (Case(model="moe", dp=4, ep=2), 4, 1)],
    ids=["dp4", "dp2-tp2", "moe-dp4-ep2"],
)
def test_replicas_share_the_reading(case: Case, world: int, copies: int, tmp_path: Path) -> None:
    """All ranks together read each tensor once, but what is whole on tensor-parallel ranks (norms) on each of them; no
    replica reads everything."""
    folder = build(case.model, tmp_path / case.model)
    want = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    ranks = shared("").run("tests.engine.megatron.weight_reading_ranks:load", (case, folder), world)
    size = {name: tensor.numel() * tensor.element_size() for name, tensor in want.items()}
    whole = sum(n for name, n in size.items() if want[name].dim() == 1)
    taken = [read for read, _ in ranks]
    assert sum(size.values()) <= sum(taken) <= sum(size.values()) + (copies - 1) * whole
    assert all(0 < read < 0.75 * sum(size.values()) for read in taken)
    found = ranks[0][1]
    assert set(found) == set(want) and all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.process
def test_a_replica_that_cannot_read_ends_the_run_on_all(tmp_path: Path) -> None:
    folder = build("dense", tmp_path / "dense")
    errors = shared("").run("tests.engine.megatron.weight_reading_ranks:fail", (Case(dp=2), folder), 2)
    assert errors[0] == errors[1] and "cannot be read" in errors[0]
