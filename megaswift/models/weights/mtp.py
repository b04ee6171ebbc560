"""Weight tables of the layers for multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2).

A folder stores such a layer under names of its own; what is inside is a decoder layer of the family. So the rules of a
decoder layer serve again, under other names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, cast

from megaswift.models.spec import ModelSpec
from megaswift.models.weights.rules import ColumnParallelRule, ReplicatedRule, WeightRule
from megaswift.models.weights.table import Place, expand_layer, weight_rule_applies

_HF_LAYER = re.compile(r"^.*?layers\.\{L\}\.")
_MEGATRON_LAYER = "decoder.layers.{L}."
DEEPSEEK_LAYER = "model.layers.{L}."
QWEN_LAYER = "mtp.layers.{K}."


@dataclass(frozen=True)
class MtpTable:
    """How a family's folders name the tensors of a layer for multi-token prediction.

    `{K}` is the layer's number among those layers, `{L}` its number after all decoder layers.
    """

    count: tuple[str, ...]
    """Fields of config.json with the number of layers; the first that is there counts, without any it is 1."""
    layer: str = DEEPSEEK_LAYER
    """The beginning of the names of the decoder layer inside."""
    embedding_norm: str = DEEPSEEK_LAYER + "enorm.weight"
    hidden_norm: str = DEEPSEEK_LAYER + "hnorm.weight"
    projection: str = DEEPSEEK_LAYER + "eh_proj.weight"
    """[h, 2 h]: the embedding's columns, then the hidden state's."""
    output_norm: str = DEEPSEEK_LAYER + "shared_head.norm.weight"
    most: int | None = None
    """The most layers that these names have room for; None: any number."""
    copies: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Tensors that some folders repeat in each layer -> the model's tensor of which they are a copy."""

    def stored_layers(self, spec: ModelSpec) -> int:
        """Return how many layers config.json says that the folder has."""
        raw = spec.language_config
        return int(next((raw[name] or 0 for name in self.count if name in raw), 1))

    def name(self, pattern: str, spec: ModelSpec, depth: int) -> str:
        """Return a name of layer `depth`."""
        return pattern.replace("{K}", str(depth)).replace("{L}", str(spec.num_layers + depth))

    def places(self, rules: Sequence[WeightRule], spec: ModelSpec) -> Iterator[Place]:
        """Yield the parameters of all layers that train, with the rules for them; `rules` are those of the model."""
        stored = replace(spec, features=replace(spec.features, stacked_experts=spec.features.mtp_stacked_experts))
        active = [rule for rule in rules if weight_rule_applies(rule, stored)]
        for depth in range(spec.mtp_layers):
            own = [self._renamed(rule, spec, depth) for rule in self._joining(depth)]
            inside = [self._renamed(rule, spec, depth) for rule in active if rule.scope in spec.mtp_kind.scopes]
            layer = spec.num_layers + depth
            yield from ((rule, layer, None) for rule in own[:-1])
            yield from expand_layer(inside, layer, spec)
            yield own[-1], layer, None

    def _joining(self, depth: int) -> list[WeightRule]:
        m = f"mtp.layers.{depth}."
        return [
            ReplicatedRule(m + "enorm.weight", (self.embedding_norm,), ("hidden_size",)),
            ReplicatedRule(m + "hnorm.weight", (self.hidden_norm,), ("hidden_size",)),
            ColumnParallelRule(m + "eh_proj.weight", (self.projection,), ("hidden_size", "twice_hidden_size")),
            ReplicatedRule(m + "final_layernorm.weight", (self.output_norm,), ("hidden_size",)),
        ]

    def _renamed(self, rule: WeightRule, spec: ModelSpec, depth: int) -> WeightRule:
        """The rule for this layer: all numbers but the expert's are in its names."""
        megatron = rule.megatron.replace(_MEGATRON_LAYER, f"mtp.layers.{depth}.transformer_layer.")
        hf = tuple(self.name(_HF_LAYER.sub(self.layer, name), spec, depth) for name in rule.hf)
        return cast(WeightRule, replace(cast(Any, rule), megatron=megatron, hf=hf, when=""))

    def copied_tensors(self, spec: ModelSpec) -> dict[str, str]:
        """Return the repeated tensors of all layers that train, each with the tensor whose values it has."""
        return {
            self.name(copy, spec, depth): original
            for depth in range(spec.mtp_layers)
            for copy, original in self.copies.items()
        }


DEEPSEEK_MTP = MtpTable(
    count=("num_nextn_predict_layers", "num_mtp_layers"),
    copies=MappingProxyType(
        {
            DEEPSEEK_LAYER + "embed_tokens.weight": "model.embed_tokens.weight",
            DEEPSEEK_LAYER + "shared_head.head.weight": "lm_head.weight",
        }
    ),
)
QWEN_MTP = MtpTable(
    count=("mtp_num_hidden_layers",),
    layer=QWEN_LAYER,
    embedding_norm="mtp.pre_fc_norm_embedding.weight",
    hidden_norm="mtp.pre_fc_norm_hidden.weight",
    projection="mtp.fc.weight",
    output_norm="mtp.norm.weight",
    most=1,
)
