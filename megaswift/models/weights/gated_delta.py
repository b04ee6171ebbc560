"""Weight tables of gated delta nets, and of the output-gated attention of the models that have them.

Megatron's rows go key head by key head, so that a tensor-parallel rank's shard is a range of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megaswift.models.spec import ModelSpec
from megaswift.models.weights.blocks import INPUT_NORM, PROJECTIONS, QK_NORM, A, H, M, shared_experts
from megaswift.models.weights.rules import (
    ColumnParallelRule,
    FusedGatedQKVRule,
    ReplicatedRule,
    RowParallelRule,
    Scope,
    Shard,
    SliceMap,
    TensorParallelShard,
    WeightRule,
    scoped,
    shard_range,
    spec_sizes,
)

S = M + "self_attention."
L = H + "linear_attn."
QUERY_KEY_VALUES = ("linear_key_width", "linear_key_width", "linear_group_values")


@dataclass(frozen=True)
class KeyHeadRowsRule:
    """Rows of several tensors in Megatron's order: for each key head its rows of the first tensor, of the second, ...

    `parts` has, for each tensor, the rows of a key head in each of its components. A tensor holds one component after
    the other, each for all key heads; with `by_head` one key head after the other, as Megatron does. With
    `by_component` Megatron's shard has all rows of a component before those of the next, as Megatron-Core's layer has.
    """

    megatron: str
    hf: tuple[str, ...]
    parts: tuple[tuple[str, ...], ...]
    tail: tuple[str, ...] = ("hidden_size",)
    by_head: bool = False
    scope: Scope = "linear"
    when: str = ""
    by_component: bool = False
    shard: ClassVar[Shard] = "column"
    stacked: ClassVar[bool] = False
    buffer: ClassVar[bool] = False

    def shapes(self, spec: ModelSpec) -> list[tuple[int, ...]]:
        """[rows of all key heads, *tail] for each tensor."""
        tail = spec_sizes(spec, self.tail)
        return [(spec.linear_groups * sum(spec_sizes(spec, part)), *tail) for part in self.parts]

    def pieces(self, spec: ModelSpec, shard: TensorParallelShard) -> list[SliceMap]:
        """For each of this rank's key heads a range of each component."""
        slices = []
        heads = range(*shard_range(spec.linear_groups, shard, "key heads of gated delta nets"))
        if self.by_component:
            return [
                self._rows(spec, source, number, head)
                for source, part in enumerate(self.parts)
                for number in range(len(part))
                for head in heads
            ]
        for head in heads:
            for source, part in enumerate(self.parts):
                sizes = spec_sizes(spec, part)
                if self.by_head:
                    sizes = (sum(sizes),)
                first = 0
                for size in sizes:
                    slices.append(SliceMap(source, first + head * size, first + (head + 1) * size))
                    first += spec.linear_groups * size
        return slices

    def component_rows(self, spec: ModelSpec) -> list[int]:
        """Return the rows of each component, of all key heads."""
        return [spec.linear_groups * size for part in self.parts for size in spec_sizes(spec, part)]

    def _rows(self, spec: ModelSpec, source: int, number: int, head: int) -> SliceMap:
        """The rows of one key head in one component of a tensor."""
        sizes = spec_sizes(spec, self.parts[source])
        before = sum(sizes[:number])
        first = head * sum(sizes) + before if self.by_head else spec.linear_groups * before + head * sizes[number]
        return SliceMap(source, first, first + sizes[number])


SPLIT_INPUT = KeyHeadRowsRule(
    S + "in_proj.weight",
    (L + "in_proj_qkv.weight", L + "in_proj_z.weight", L + "in_proj_b.weight", L + "in_proj_a.weight"),
    (QUERY_KEY_VALUES, ("linear_group_values",), ("linear_group_heads",), ("linear_group_heads",)),
)
"""Of qwen3_5: queries, keys and values; gates; write strengths; steps."""
JOINED_INPUT = KeyHeadRowsRule(
    S + "in_proj.weight",
    (L + "in_proj_qkvz.weight", L + "in_proj_ba.weight"),
    ((*QUERY_KEY_VALUES, "linear_group_values"), ("linear_group_heads", "linear_group_heads")),
    by_head=True,
)
"""The same rows of qwen3_next, in two tensors."""


def gated_delta_net(inputs: KeyHeadRowsRule) -> tuple[WeightRule, ...]:
    """Norm, input projection, convolution, decays, output norm and output projection of a layer."""
    return (
        ReplicatedRule(
            S + "in_proj.layer_norm_weight", (H + "input_layernorm.weight",), ("hidden_size",), scope="linear"
        ),
        inputs,
        KeyHeadRowsRule(S + "conv1d_weight", (L + "conv1d.weight",), (QUERY_KEY_VALUES,), tail=("one", "linear_taps")),
        ColumnParallelRule(S + "A_log", (L + "A_log",), ("linear_heads",), "linear"),
        ColumnParallelRule(S + "dt_bias", (L + "dt_bias",), ("linear_heads",), "linear"),
        ReplicatedRule(S + "out_norm_weight", (L + "norm.weight",), ("linear_value_width",), "linear"),
        RowParallelRule(S + "out_proj.weight", (L + "out_proj.weight",), ("hidden_size", "linear_values"), "linear"),
    )


def gated_shared_expert() -> tuple[WeightRule, ...]:
    """The expert that every token goes through, and its gate."""
    gate = ReplicatedRule(
        M + "mlp.shared_experts.gate_weight", (H + "mlp.shared_expert_gate.weight",), ("one", "hidden_size"), "moe"
    )
    return (*shared_experts("shared_expert"), gate)


GATED_ATTENTION: tuple[WeightRule, ...] = (
    *scoped((INPUT_NORM,), "attention"),
    FusedGatedQKVRule(
        S + "linear_qkv.weight", (A + "q_proj.weight", A + "k_proj.weight", A + "v_proj.weight"), "attention"
    ),
    *scoped(PROJECTIONS[1:], "attention"),
    *scoped(QK_NORM, "attention"),
)
"""Attention with output gates, norms on queries and keys, and no biases."""
