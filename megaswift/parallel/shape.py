"""The sizes of a model that decide how it can be split and what it costs.

Owns the few numbers that checks and cost arithmetic read; the whole description of a model is `megaswift.families.spec.ModelSpec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Spec(Protocol):
    """What a shape is made from: `megaswift.families.spec.ModelSpec`."""

    @property
    def transformer(self) -> Mapping[str, Any]: ...  # noqa: D102
    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def tied(self) -> bool: ...  # noqa: D102
    @property
    def moe_layers(self) -> tuple[bool, ...]: ...  # noqa: D102


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer in numbers."""

    num_layers: int
    hidden_size: int
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    head_dim: int
    ffn: int
    """Inner width of a dense MLP."""
    vocab_size: int
    """Without padding."""
    tied: bool = False
    """The output layer is the input embedding."""
    experts: int = 0
    """Experts of a MoE layer; 0 for a dense model."""
    topk: int = 0
    """Experts per token."""
    expert_ffn: int = 0
    """Inner width of one expert."""
    shared_ffn: int = 0
    """Inner width of a MoE layer's shared expert; 0 without one."""
    shared_gate: bool = False
    """The shared expert's output has a gate of its own (a vector of hidden_size)."""
    moe_layers: tuple[bool, ...] = ()
    """For each layer whether it is a MoE layer; empty for a dense model."""
    gated: bool = True
    """MLPs have a gate: their first matrix is twice as high."""
    qkv_bias: bool = False
    linear_bias: bool = False
    """Bias on the other linear layers of attention and MLP."""
    qk_norm: bool = False
    """A norm over head_dim on queries and keys."""
    norm_bias: bool = False
    """LayerNorm in place of RMSNorm."""

    @classmethod
    def of(cls, spec: Spec) -> ModelShape:
        """The shape of a model."""
        t = spec.transformer
        experts = t.get("num_moe_experts") or 0
        bias = bool(t.get("add_bias_linear", False))
        return cls(
            num_layers=t["num_layers"], hidden_size=t["hidden_size"], heads=t["num_attention_heads"], kv_heads=t["num_query_groups"],
            head_dim=t["kv_channels"], ffn=t["ffn_hidden_size"], vocab_size=spec.vocab_size, tied=spec.tied, experts=experts,
            topk=t["moe_router_topk"] if experts else 0, expert_ffn=t["moe_ffn_hidden_size"] if experts else 0,
            shared_ffn=(t.get("moe_shared_expert_intermediate_size") or 0) if experts else 0,
            shared_gate=bool(t.get("moe_shared_expert_gate", False)), moe_layers=tuple(spec.moe_layers) if experts else (),
            gated=bool(t.get("gated_linear_unit", False)), qkv_bias=bias or bool(t.get("add_qkv_bias", False)), linear_bias=bias,
            qk_norm=bool(t.get("qk_layernorm", False)), norm_bias=t.get("normalization", "RMSNorm") == "LayerNorm")

    def is_moe(self, layer: int) -> bool:
        """Whether layer `layer` is a MoE layer."""
        return self.experts > 0 and (self.moe_layers[layer] if self.moe_layers else True)

    @property
    def dense_layers(self) -> int:
        """Layers with a dense MLP."""
        return sum(not self.is_moe(layer) for layer in range(self.num_layers))
