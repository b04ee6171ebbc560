"""Rows of fused layers in the orders of Megatron-Core and of ms-swift, worked out by hand.

Covers: megaswift/bridge/foreign/rows.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megaswift.bridge.foreign.rows import family_with_rows, is_of_swift
from megaswift.bridge.plan import WeightPlan
from megaswift.families import family_of, load_spec
from megaswift.folders.foreign import ForeignFolder
from megaswift.models.weights.rules import TensorParallelShard
from tests.bridge.folders import make

# the hybrid models of the tests: 4 key heads of 8, 8 value heads of 12; 8 query heads of 16, 2 KV groups
QKV = "decoder.layers.2.self_attention.linear_qkv.weight"
INPUTS = "decoder.layers.0.self_attention.in_proj.weight"
TAPS = "decoder.layers.0.self_attention.conv1d_weight"


def rows(variant: str, folders: Path, swift: bool, name: str, tp: int = 1, rank: int = 0) -> list[tuple[int, int, int]]:
    """(Hugging Face tensor, first row, rows), neighbours joined."""
    spec = load_spec(make(variant, folders))
    plan = WeightPlan(family_with_rows(family_of(spec.hf_config), swift), spec)
    joined: list[tuple[int, int, int]] = []
    for piece in plan.by_megatron[name].pieces(TensorParallelShard(tp, rank)):
        source, first, count = piece.source, piece.start, piece.length
        if joined and joined[-1][0] == source and sum(joined[-1][1:]) == first:
            first = joined[-1][1]
            count += joined.pop()[2]
        joined.append((source, first, count))
    return joined


def test_queries_and_gates(folders: Path) -> None:
    heads = [(0, 32 * head, 16) for head in range(4)]
    gates = [(0, 32 * head + 16, 16) for head in range(4)]
    keys_and_values = [(1, 0, 16), (2, 0, 16)]
    assert rows("qwen3_5", folders, False, QKV, 2) == [*heads, *gates, *keys_and_values]
    assert rows("qwen3_5", folders, True, QKV, 2) == [(0, 0, 128), *keys_and_values]


@pytest.mark.parametrize("rank", [0, 1])
def test_gated_delta_nets(rank: int, folders: Path) -> None:
    queries = (0, 16 * rank, 16)
    keys = (0, 32 + 16 * rank, 16)
    values = (0, 64 + 48 * rank, 48)
    rest = [(1, 48 * rank, 48), (2, 4 * rank, 4), (3, 4 * rank, 4)]
    assert rows("qwen3_5", folders, False, INPUTS, 2, rank) == [queries, keys, values, *rest]
    assert rows("qwen3_5", folders, False, TAPS, 2, rank) == [queries, keys, values]
    first = rows("qwen3_5", folders, True, INPUTS, 2, rank)[:6]
    assert first == [(0, 16 * rank, 8), (0, 32 + 16 * rank, 8), (0, 64 + 48 * rank, 24), *of_head(2 * rank)]


def of_head(head: int) -> list[tuple[int, int, int]]:
    """The gates, write strengths and steps of one key head."""
    return [(1, 24 * head, 24), (2, 2 * head, 2), (3, 2 * head, 2)]


def test_gated_delta_nets_with_joined_inputs(folders: Path) -> None:
    """Qwen3-Next: 64 rows of queries, keys, values, gates for each key head, 4 of write strengths and steps."""
    each = [(0, 64 * head, 64) for head in range(4)]
    found = rows("qwen3_next", folders, False, INPUTS)
    assert found[:4] == [(0, first, 8) for _, first, _ in each]
    assert found[4:8] == [(0, first + 8, 8) for _, first, _ in each]
    assert found[8:12] == [(0, first + 16, 24) for _, first, _ in each]
    assert found[12:16] == [(0, first + 40, 24) for _, first, _ in each]
    assert found[16:20] == [(1, 4 * head, 2) for head in range(4)]
    assert found[20:] == [(1, 4 * head + 2, 2) for head in range(4)]


def test_whose_rows(tmp_path: Path) -> None:
    sharded = ForeignFolder(tmp_path, tmp_path / "iter_0000001", False)
    whole = ["model.decoder.layers.0.self_attention.in_proj.weight"]
    parts = ["decoder.layers.0.self_attention.in_proj.weight.query"]
    assert is_of_swift(sharded, whole) and not is_of_swift(sharded, parts) and not is_of_swift(sharded, [])
    (tmp_path / "args.json").write_text("{}")
    assert is_of_swift(sharded, []) and not is_of_swift(sharded, parts)
    assert not is_of_swift(ForeignFolder(tmp_path, sharded.tensors, True), whole)
