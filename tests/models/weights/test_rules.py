"""Rules against layouts written out by hand, and the two properties that all rules share.

Covers: megaswift/models/weights/blocks.py, megaswift/models/weights/rules.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megaswift.errors import LayoutError
from megaswift.families import FAMILIES, ModelSpec, family_of
from megaswift.models.published.table import LLAMA_3_1_8B, PUBLISHED
from megaswift.models.weights.gated_delta import JOINED_INPUT, SPLIT_INPUT, gated_delta_net
from megaswift.models.weights.rules import (
    FusedGatedQKVRule,
    FusedQKVRule,
    GateUpRule,
    OneRowRule,
    ReplicatedRule,
    RowParallelRule,
    SliceMap,
    TensorParallelShard,
    VocabParallelRule,
    shard_dim,
)


def small() -> ModelSpec:
    """4 query heads of width 2 on 2 KV heads; hidden 6, ffn 4, vocabulary 10."""
    spec = family_of(LLAMA_3_1_8B).spec(LLAMA_3_1_8B)
    return replace(
        spec,
        vocab_size=10,
        transformer={
            **spec.transformer,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "kv_channels": 2,
            "hidden_size": 6,
            "ffn_hidden_size": 4,
        },
    )


def ranges(pieces: list[SliceMap]) -> list[tuple[int, int, int]]:
    """Pieces as plain tuples."""
    return [(p.source, p.start, p.stop) for p in pieces]


def test_qkv_by_hand() -> None:
    rule = FusedQKVRule("m", ("q", "k", "v"))
    assert rule.shapes(small()) == [(8, 6), (4, 6), (4, 6)]
    first, second = [(0, 0, 4), (1, 0, 2), (2, 0, 2)], [(0, 4, 8), (1, 2, 4), (2, 2, 4)]
    assert ranges(rule.pieces(small(), TensorParallelShard())) == first + second
    assert ranges(rule.pieces(small(), TensorParallelShard(2, 0))) == first
    assert ranges(rule.pieces(small(), TensorParallelShard(2, 1))) == second
    more_ranks_than_groups = [ranges(rule.pieces(small(), TensorParallelShard(4, rank))) for rank in range(4)]
    assert more_ranks_than_groups == [first[:1], first[1:], second[:1], second[1:]]
    with pytest.raises(LayoutError, match="tensor parallel size 3"):
        rule.pieces(small(), TensorParallelShard(3, 0))


def test_gated_mlp_by_hand() -> None:
    rule = GateUpRule("m", ("gate", "up"))
    assert ranges(rule.pieces(small(), TensorParallelShard())) == [(0, 0, 4), (1, 0, 4)]
    assert ranges(rule.pieces(small(), TensorParallelShard(2, 1))) == [(0, 2, 4), (1, 2, 4)]


def test_rows_copies_and_padded_vocabulary_by_hand() -> None:
    assert ranges(
        RowParallelRule("m", ("o",), ("hidden_size", "attention_width")).pieces(small(), TensorParallelShard(4, 3))
    ) == [(0, 6, 8)]
    assert ranges(ReplicatedRule("m", ("n",), ("hidden_size",)).pieces(small(), TensorParallelShard(4, 3))) == [
        (0, 0, 6)
    ]
    assert ranges(VocabParallelRule("m", ("e",)).pieces(small(), TensorParallelShard(2, 1, padded_vocab=16))) == [
        (0, 8, 16)
    ]
    with pytest.raises(LayoutError, match="padded vocabulary"):
        VocabParallelRule("m", ("e",)).pieces(small(), TensorParallelShard(4, 0))


@pytest.mark.wide
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_pieces_of_all_ranks_cover_every_row_once(name: str, tp: int) -> None:
    config, _ = PUBLISHED[name]
    family = family_of(config)
    spec = family.spec(config)
    for rule in family.weights:
        if rule.when and not getattr(spec, rule.when) or rule.scope in ("moe", "expert") and not spec.experts:
            continue
        shapes = rule.shapes(spec)
        ranks = range(tp if rule.shard != "replicated" else 1)
        padded = -(-spec.vocab_size // tp) * tp
        pieces = [
            p
            for rank in ranks
            for p in rule.pieces(spec, TensorParallelShard(tp, rank, padded, 3 if rule.scope == "expert" else None))
        ]
        for source, shape in enumerate(shapes):
            mine = sorted(i for p in pieces if p.source == source for i in range(p.start, p.stop, p.stride))
            assert mine == list(range(padded if rule.shard == "vocab" else shape[pieces[0].hf_dim(shard_dim(rule))]))
            at = (0,) if isinstance(rule, OneRowRule) else (3,) if rule.stacked else ()
            assert all(p.at == at for p in pieces)
        assert len(shapes) == len(rule.hf)


@pytest.mark.parametrize("name", FAMILIES.names())
def test_a_family_is_registered_under_its_model_type(name: str) -> None:
    family = FAMILIES.get(name)
    assert family.name == name
    assert {n for row in family.rows for n in row.keys} >= {"hidden_size", "rope_theta", "architectures"}


def hybrid() -> ModelSpec:
    """4 query heads of width 2 on 2 KV heads; gated delta nets with 2 key heads of width 3, each with 2 value heads of
    width 5."""
    spec = small()
    sizes = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 3,
        "linear_value_head_dim": 5,
        "linear_conv_kernel_dim": 4,
    }
    return replace(spec, transformer={**spec.transformer, **sizes})


def test_gated_qkv_by_hand() -> None:
    rule = FusedGatedQKVRule("m", ("q", "k", "v"))
    assert rule.shapes(hybrid()) == [(16, 6), (4, 6), (4, 6)]
    first = [(0, 0, 2), (0, 4, 6), (0, 2, 4), (0, 6, 8), (1, 0, 2), (2, 0, 2)]
    second = [(0, 8, 10), (0, 12, 14), (0, 10, 12), (0, 14, 16), (1, 2, 4), (2, 2, 4)]
    assert ranges(rule.pieces(hybrid(), TensorParallelShard())) == first + second
    assert ranges(rule.pieces(hybrid(), TensorParallelShard(2, 1))) == second
    more_ranks_than_groups = [ranges(rule.pieces(hybrid(), TensorParallelShard(4, rank))) for rank in range(4)]
    assert more_ranks_than_groups == [first[:3], first[3:], second[:3], second[3:]]


def test_rows_of_key_heads_by_hand() -> None:
    """Queries, keys, values of both heads in one tensor, gates in the next: head by head, whichever way they lie."""
    assert SPLIT_INPUT.shapes(hybrid()) == [(32, 6), (20, 6), (4, 6), (4, 6)]
    first = [(0, 0, 3), (0, 6, 9), (0, 12, 22), (1, 0, 10), (2, 0, 2), (3, 0, 2)]
    second = [(0, 3, 6), (0, 9, 12), (0, 22, 32), (1, 10, 20), (2, 2, 4), (3, 2, 4)]
    assert ranges(SPLIT_INPUT.pieces(hybrid(), TensorParallelShard())) == first + second
    assert ranges(SPLIT_INPUT.pieces(hybrid(), TensorParallelShard(2, 1))) == second
    assert JOINED_INPUT.shapes(hybrid()) == [(52, 6), (8, 6)]
    assert ranges(JOINED_INPUT.pieces(hybrid(), TensorParallelShard())) == [
        (0, 0, 26),
        (1, 0, 4),
        (0, 26, 52),
        (1, 4, 8),
    ]
    assert ranges(JOINED_INPUT.pieces(hybrid(), TensorParallelShard(2, 1))) == [(0, 26, 52), (1, 4, 8)]
    [convolution] = [rule for rule in gated_delta_net(SPLIT_INPUT) if rule.megatron.endswith("conv1d_weight")]
    assert convolution.shapes(hybrid()) == [(32, 1, 4)]
    assert ranges(convolution.pieces(hybrid(), TensorParallelShard(2, 1))) == second[:3]
    with pytest.raises(LayoutError, match="key heads of gated delta nets"):
        SPLIT_INPUT.pieces(hybrid(), TensorParallelShard(4, 0))
