"""The parameters that a rank of a pipeline stage holds: how many elements each has, and whether it trains.

Owns which weights and adapters lie on a rank, from the family's weight table. What they cost in bytes depends on the
engine and its optimizer: `state_bytes.py`.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megaswift.bridge.adapters.options.lora import LoraConfig
from megaswift.models.family import Family, family_of
from megaswift.models.heads import head_names
from megaswift.models.options.model import ModelConfig
from megaswift.models.qlora import is_four_bit_weight
from megaswift.models.spec import ModelSpec
from megaswift.models.targets import (
    WEIGHT,
    Projection,
    modules_to_save_tensor_names,
    select_projections,
)
from megaswift.models.weights.rules import TensorParallelShard, WeightRule
from megaswift.models.weights.table import (
    format_rule_name,
    padded_vocabulary_size,
    shard_shape,
)
from megaswift.parallel.layout import Layout
from megaswift.parallel.pipeline_split import ModelChunk

EMBEDDING = "embedding."
"""How the embedding's name begins in every weight table."""
FLOAT32 = ("self_attention.A_log", "self_attention.out_norm_weight")
"""Ends of the names of parameters that stay in float32 (`engine/megatron/layers/delta_net.py`)."""
MTP = "mtp."
"""How names of layers for multi-token prediction begin, which lie on the last stage."""


@dataclass(frozen=True)
class RankParameter:
    """One parameter, as it lies on a rank."""

    elements: int
    trains: bool = True
    expert: bool = False
    """Replicated over the ranks that hold the same experts, not over all data-parallel ranks."""
    four_bits: bool = False
    """NF4 with a scale for each block of inputs."""
    product: bool = False
    """A linear layer's weight inside a decoder layer: those that FP8 products quantize."""
    shared: bool = False
    """A tied embedding that the first and the last pipeline stage both hold."""
    adapter: bool = False
    """A matrix of a LoRA adapter."""
    float32: bool = False
    """Kept in float32 whatever the model's precision."""
    restored: bool = False
    """A base weight that trains beside adapters: its first values are kept too, for the model without adapters."""


RankParameters = Counter[RankParameter]
"""Parameters of a model chunk on a rank, with how often each occurs."""


@dataclass(frozen=True)
class TrainedParts:
    """The parts of a model that train, from the options."""

    full: bool
    frozen: tuple[str, ...]
    """Patterns of Hugging Face names (`--freeze_parameters`)."""
    thawed: tuple[str, ...]
    """Patterns of what trains among them (`--trainable_parameters`)."""
    saved: frozenset[str]
    """Hugging Face tensors that train beside adapters (`--modules_to_save`)."""
    adapters: Mapping[str, Sequence[Projection]]
    """Megatron's module -> projections that carry an adapter."""
    rank: int
    dora: bool
    four_bits: bool

    @classmethod
    def of(cls, model: ModelConfig, lora: LoraConfig, family: Family, spec: ModelSpec) -> TrainedParts:
        """Those of a run of full fine-tuning, LoRA or QLoRA."""
        full = model.train_type == "full"
        adapters: dict[str, list[Projection]] = defaultdict(list)
        for p in [] if full else select_projections(family, spec, lora.target_modules, lora.target_parameters):
            adapters[p.megatron].append(p)
        # a classifier's head trains whole beside adapters
        saved = [] if full else [*modules_to_save_tensor_names(family, spec, lora.modules_to_save), *head_names(spec)]
        return cls(
            full,
            model.freeze_parameters,
            model.trainable_parameters,
            frozenset(saved),
            adapters,
            lora.lora_rank,
            lora.use_dora,
            model.train_type == "qlora",
        )

    @cached_property
    def adapted_modules(self) -> dict[int, tuple[tuple[str, int], ...]]:
        """For each layer, (module, number of adapters) of its modules with adapters."""
        found: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for module, projections in self.adapters.items():
            if match := re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", module):
                found[int(match[1])].append((match[2], len(projections)))
        return {layer: tuple(sorted(modules)) for layer, modules in found.items()}

    @property
    def alike_by_kind(self) -> bool:
        """Return whether layers of a kind with the same adapters, and their experts, train alike."""
        return not self.frozen and not any(re.search(r"\.\d+\.", name) for name in self.saved)

    @cached_property
    def kept_by_layer(self) -> dict[object, int]:
        """Bytes of activations that layers keep, as far as they have been computed (`activation_bytes.py`)."""
        return {}

    @cached_property
    def passes_by_layer(self) -> dict[object, list[Any]]:
        """The same of operations of their passes."""
        return {}

    @cached_property
    def _counted_alike(self) -> dict[tuple[int, ...], Counter[int]]:
        return {}

    def alike(self, layers: Iterable[int], spec: ModelSpec) -> Counter[int]:
        """Returns how many of these layers are made alike and adapted alike, under the first of each kind."""
        key = tuple(layers)
        if key not in self._counted_alike:
            found: dict[object, list[int]] = {}
            for layer in key:
                found.setdefault(self.kind(layer, spec), []).append(layer)
            self._counted_alike[key] = Counter({same[0]: len(same) for same in found.values()})
        return self._counted_alike[key]

    def kind(self, layer: int, spec: ModelSpec) -> Hashable:
        """Return what is the same for layers that are made alike and adapted alike."""
        return spec.layer_kinds[layer], self.adapted_modules.get(layer)

    def trains(self, names: Sequence[str]) -> bool:
        """Return whether the parameter that is made of these Hugging Face tensors trains."""
        if self.full:
            frozen, thawed = (
                any(re.search(pattern, name) for pattern in patterns for name in names)
                for patterns in (self.frozen, self.thawed)
            )
            return thawed or not frozen
        return bool(self.saved & set(names))


@dataclass(frozen=True)
class ParametersByPlace:
    """The parameters that the first rank of each place of the model holds."""

    embedding: RankParameters
    layers: Mapping[int, RankParameters]
    final: RankParameters
    """The final norm and the head."""
    shared: bool
    """Whether the last stage holds the embedding too: as the head, or for multi-token prediction."""

    def of_chunk(self, chunk: ModelChunk) -> RankParameters:
        """The parameters of a model chunk."""
        held: RankParameters = Counter()
        if chunk.embedding or (self.shared and chunk.loss):
            held.update(self.embedding)
        if chunk.loss:
            held.update(self.final)
        for layer in chunk.layers:
            held.update(self.layers[layer])
        return held


def parameters_by_place(
    spec: ModelSpec, parts: TrainedParts, layout: Layout, grouped_experts: bool
) -> ParametersByPlace:
    """Counts the parameters of embedding, layers and head on a rank. Depends on tp, ep, etp and on whether there is a
    pipeline."""
    family = family_of(spec.hf_config)
    sizes = _ShardSizes(spec, layout)
    shared = layout.pp > 1 and (spec.tied or spec.mtp_layers > 0)
    places = ParametersByPlace(Counter(), {i: Counter() for i in range(spec.num_layers)}, Counter(), shared)
    stacks: Counter[tuple[int | None, str, int]] = Counter()
    """Elements by layer, base weight and number of the adapter's matrix."""
    own = spec.experts // layout.ep
    # Where patterns tell neither layers nor experts apart, one of each kind is counted for all.
    alike = {layer: layer for layer in range(spec.num_layers)}
    if uniform := parts.alike_by_kind:
        first: dict[object, int] = {}
        alike = {i: first.setdefault((spec.layer_kinds[i], parts.adapted_modules.get(i)), i) for i in alike}
    counted = set(alike.values())
    experts = 1 if uniform else own
    # Walk the weights that the first rank holds; experts of other ranks are skipped.
    for rule, layer, expert in family.places(spec):
        in_layer = layer is not None and not rule.megatron.startswith(MTP)
        if rule.buffer or (in_layer and layer not in counted) or (expert is not None and expert >= experts):
            continue
        names = [format_rule_name(name, layer, expert) for name in rule.hf]
        trains = parts.trains(names)
        product = is_four_bit_weight(rule)
        embeds = rule.megatron.startswith(EMBEDDING)
        parameter = RankParameter(
            sizes.weight(rule, expert),
            trains,
            expert is not None,
            parts.four_bits and product,
            product,
            shared and embeds,
            float32=rule.megatron.endswith(FLOAT32),
            restored=trains and not parts.full,
        )
        # Add the weight to its place, and the adapters on it.
        module = format_rule_name(rule.megatron, layer, expert).removesuffix(WEIGHT)
        adapted = parts.adapters.get(module, ()) if rule.megatron.endswith(WEIGHT) else ()
        held = places.final
        if embeds:
            held = places.embedding
        elif in_layer and layer is not None:
            held = places.layers[layer]
        times = own if uniform and expert is not None else 1
        held[parameter] += times
        for number, elements in enumerate(sizes.adapters(rule, expert, adapted, parts)):
            if grouped_experts and expert is not None:
                stacks[layer, rule.megatron, number] += elements * times
            else:
                held[RankParameter(elements, expert=expert is not None, adapter=True)] += times
    # Adapters of grouped experts were summed over the experts, since they are one parameter.
    for (layer, *_), elements in stacks.items():
        assert layer is not None
        places.layers[layer][RankParameter(elements, expert=True, adapter=True)] += 1
    layers = {layer: places.layers[alike[layer]] for layer in places.layers}
    return ParametersByPlace(places.embedding, layers, places.final, shared)


class _ShardSizes:
    """Elements of a rank's shards; a rule's are the same in every layer and expert."""

    def __init__(self, spec: ModelSpec, layout: Layout) -> None:
        self.spec = spec
        self.layout = layout
        self.padded = padded_vocabulary_size(spec, layout.tp)
        self._known: dict[int, tuple[WeightRule, int]] = {}
        """By the rule's identity; the rule is kept, because a later one could be made in its place."""

    def _shard(self, rule: WeightRule, expert: int | None) -> TensorParallelShard:
        return TensorParallelShard(self._ranks(expert), 0, self.padded, expert)

    def _ranks(self, expert: int | None) -> int:
        return self.layout.tp if expert is None else self.layout.etp

    def weight(self, rule: WeightRule, expert: int | None) -> int:
        """Elements of a parameter."""
        if id(rule) not in self._known:
            self._known[id(rule)] = (rule, math.prod(shard_shape(rule, self.spec, self._shard(rule, expert))))
        return self._known[id(rule)][1]

    def adapters(
        self, rule: WeightRule, expert: int | None, adapted: Sequence[Projection], parts: TrainedParts
    ) -> Iterator[int]:
        """Elements of A, B (and DoRA's magnitudes) of each adapter: A [r, in] is cut where the weight's inputs are, B
        [out, r] where its outputs are (`bridge/adapters/plan.py`)."""
        for projection in adapted:
            out, width = projection.shape
            if rule.shard == "row":
                width //= self._ranks(expert)
            elif rule.shard == "column":
                pieces = rule.pieces(self.spec, self._shard(rule, expert))
                out = sum(p.length for p in pieces if p.source == projection.source)
            yield from (parts.rank * width, out * parts.rank)
            if parts.dora:
                yield out
