"""Trace folders: what is written comes back, and damage is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megaswift.bisection.trace_folder import Entry, RankTrace, Trace, write_index
from megaswift.errors import UserError
from megaswift.parallel.layout import Layout


def written(folder: Path) -> Path:
    """A trace of one rank."""
    rank = RankTrace(0)
    rank.add(Entry("output", "layers.0", 1), torch.arange(6.0).view(2, 3))
    rank.add(Entry("output", "layers.0", 1), torch.zeros(2, 3))
    rank.add(Entry("weight", "layers.0.mlp.linear_fc1.weight", None, 7), torch.ones(4))
    rank.write(folder)
    write_index(folder, Layout(1), torch.bfloat16, lr=0.5)
    return folder


def test_a_trace_comes_back(tmp_path: Path) -> None:
    """The first tensor of an entry stays."""
    trace = Trace.open(written(tmp_path / "trace"))
    assert trace.layout == Layout(1) and trace.about["dtype"] == "bfloat16" and trace.about["lr"] == 0.5
    [rank] = trace.ranks()
    assert {e.name: e.start for e in rank.tensors} == {"layers.0": 0, "layers.0.mlp.linear_fc1.weight": 7}
    assert torch.equal(rank.tensors[Entry("output", "layers.0", 1)], torch.arange(6.0).view(2, 3))


def test_experts_may_be_numbered_within_the_rank(tmp_path: Path) -> None:
    """As plain Megatron names them: here each of two ranks has two."""
    for number in range(2):
        rank = RankTrace(number)
        for expert in range(2):
            name = f"layers.0.mlp.experts.local_experts.{expert}.linear_fc1.weight"
            rank.add(Entry("weight", name, None, 0), torch.ones(1))
        rank.write(tmp_path)
    write_index(tmp_path, Layout(2, ep=2), torch.float32)
    found = [[entry.name.split(".")[4] for entry in rank.tensors] for rank in Trace.open(tmp_path).ranks()]
    assert found == [["0", "1"], ["2", "3"]]


@pytest.mark.parametrize("damage", ["missing", "format", "no json", "half", "no row"])
def test_damage_is_named(damage: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "trace")
    index = folder / "trace.json"
    if damage == "missing":
        (folder / "rank-0.json").unlink()
    elif damage == "format":
        index.write_text(json.dumps({**json.loads(index.read_text()), "format": 2}))
    elif damage == "no json":
        index.write_text("{")
    elif damage == "half":
        file = folder / "rank-0.safetensors"
        file.write_bytes(file.read_bytes()[:50])
    else:
        (folder / "rank-0.json").write_text(json.dumps({"tensors": [{"kind": "output"}]}))
    with pytest.raises(UserError, match="docs/bisect.md|record"):
        list(Trace.open(folder).ranks())
