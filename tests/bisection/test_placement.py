"""Which part of a whole tensor a rank holds: by hand, and parts that cover the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megaswift.bisection.placement import Placement, Rows
from megaswift.bisection.trace_folder import Entry
from megaswift.bridge.plan import WeightPlan
from megaswift.families import family_of
from megaswift.parallel.layout import Layout
from tests.parity.models import config

FC1 = "layers.0.mlp.linear_fc1"


def placement(layout: Layout) -> Placement:
    """Of the model `dense`: 8 heads of 16 in 4 groups, 96 inner columns."""
    read = config("dense").to_dict()
    spec = family_of(read).spec(read)
    return Placement(WeightPlan(family_of(read), spec), spec, layout)


def test_tokens_of_context_and_sequence_parallel_ranks() -> None:
    """Rank 1 of 2 has chunks 1 and 2 of 4; of its positions the second tensor-parallel rank has the second half."""
    layout = Layout(4, tp=2, cp=2, sequence_parallel=True)
    rows = Rows(torch.ones(1, 8, dtype=torch.bool), None)
    place = layout.coordinates(3)
    assert (place.tp, place.cp) == (1, 1)
    found = placement(layout)
    assert found.tokens(4, rows, place).tolist() == [2, 3, 4, 5]
    assert found.tokens(2, rows, place).tolist() == [4, 5]
    assert found.tokens(8, rows, place).tolist() == list(range(8))
    assert found.tokens(3, rows, place) is None
    two = Rows(torch.ones(2, 4, dtype=torch.bool), None)
    assert found.tokens(4, two, layout.coordinates(0)).tolist() == [0, 1, 6, 7], "positions 0 and 3 of both rows"


def test_columns_of_fused_products() -> None:
    """Gate and up are parts of two tensors; queries, keys and values go by groups."""
    layout = Layout(2, tp=2)
    found = placement(layout)
    second = layout.coordinates(1)
    assert found.columns(FC1, 96, 192, second).tolist() == [*range(48, 96), *range(144, 192)]
    columns = found.columns("layers.0.self_attention.linear_qkv", 128, 256, second).tolist()
    assert columns[:32] == list(range(64, 96)) and columns[32:48] == list(range(160, 176)), "queries, then the key"
    assert columns[48:64] == list(range(224, 240)), "the group's value"
    assert found.columns("layers.0.self_attention.core_attention", 64, 128, second).tolist() == list(range(64, 128))
    shared = placement(Layout(8, tp=8))
    assert shared.columns("x.key", 16, 64, Layout(8, tp=8).coordinates(3)).tolist() == list(range(16, 32))


@pytest.mark.parametrize("layout", [Layout(4, tp=2, cp=2, sequence_parallel=True), Layout(4, tp=4), Layout(2, cp=2)])
def test_parts_join_to_the_whole(layout: Layout, tmp_path: Path) -> None:
    """What is cut for every rank is the whole tensor again; without the parts of one rank it is not."""
    found = placement(layout)
    rows = Rows(torch.ones(2, 8, dtype=torch.bool), None)
    whole = torch.randn(16, 192)
    entry = Entry("output", FC1, 0)
    columns = 192 // layout.tp
    parts = []
    for rank in range(layout.world_size):
        place = layout.coordinates(rank)
        part, mask = found.cut_activation(whole, torch.Size((16 // layout.cp, columns)), entry, rows, place)
        assert mask.all() and part.shape == (16 // layout.cp, columns)
        parts.append((part, place))
    assert torch.equal(found.join_activation(parts, entry, rows, 192), whole)
    assert not torch.equal(found.join_activation(parts[1:], entry, rows, 192), whole)


def test_parameters() -> None:
    """A shard's flat elements, from where the optimizer's part begins."""
    layout = Layout(2, tp=2)
    weights = {f"model.layers.0.mlp.{n}_proj.weight": torch.randn(96, 64) for n in ("gate", "up")}
    got = placement(layout).cut_parameter(
        weights, Entry("weight", f"{FC1}.weight", None, 64), 128, layout.coordinates(1)
    )
    assert torch.equal(got, weights["model.layers.0.mlp.gate_proj.weight"][49:51].flatten())
    norm = {"model.layers.0.input_layernorm.weight": torch.randn(64)}
    plain = Entry("weight", "layers.0.input_layernorm.weight")
    assert torch.equal(placement(layout).cut_parameter(norm, plain, 64, layout.coordinates(0)), *norm.values())
