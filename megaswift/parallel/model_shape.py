"""The sizes of a model that determine valid layouts.

Owns the few numbers that the checks read; the whole description of a model is
`megaswift.models.spec.ModelSpec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class ShapeSource(Protocol):
    """What a shape is made from: `megaswift.models.spec.ModelSpec`."""

    @property
    def transformer(self) -> Mapping[str, Any]: ...  # noqa: D102
    @property
    def moe_layers(self) -> tuple[bool, ...]: ...  # noqa: D102
    @property
    def features(self) -> Any: ...  # noqa: D102


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer in the numbers that a layout has to divide."""

    num_layers: int
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    head_dim: int
    ffn: int
    """Inner width of a dense MLP."""
    experts: int = 0
    """Experts of a MoE layer; 0 for a dense model."""
    expert_ffn: int = 0
    """Inner width of one expert."""
    expert_bias: bool = False
    """Whether experts have biases."""
    shared_ffn: int = 0
    """Inner width of a MoE layer's shared expert; 0 without one."""
    moe_layers: tuple[bool, ...] = ()
    """For each layer whether it is a MoE layer; empty for a dense model."""
    linear_groups: int = 0
    """Key heads of a gated delta net; 0 for a model without one."""
    whole_kv: bool = False
    """A rank needs whole KV heads of its own: keys are normalized over all heads together."""

    @classmethod
    def of(cls, spec: ShapeSource) -> ModelShape:
        """The shape of a model."""
        t = spec.transformer
        experts = t.get("num_moe_experts") or 0
        return cls(
            num_layers=t["num_layers"],
            heads=t["num_attention_heads"],
            kv_heads=t["num_query_groups"],
            head_dim=t["kv_channels"],
            ffn=t["ffn_hidden_size"],
            experts=experts,
            expert_ffn=t["moe_ffn_hidden_size"] if experts else 0,
            expert_bias=bool(experts and t.get("add_bias_linear")),
            shared_ffn=(t.get("moe_shared_expert_intermediate_size") or 0) if experts else 0,
            moe_layers=tuple(spec.moe_layers) if experts else (),
            linear_groups=t["linear_num_key_heads"] if any(spec.features.linear_layers) else 0,
            whole_kv=spec.features.qk_norm_width == "all",
        )

    def is_moe(self, layer: int) -> bool:
        """Whether layer `layer` is a MoE layer."""
        return self.experts > 0 and (self.moe_layers[layer] if self.moe_layers else True)

    @property
    def dense_layers(self) -> int:
        """Layers with a dense MLP."""
        return sum(not self.is_moe(layer) for layer in range(self.num_layers))
