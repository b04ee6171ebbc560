"""Finds the tensors of another program's checkpoint that make up each parameter of a weight plan.

Owns the key layouts: layers stacked in one tensor ("homogeneous") or under names of their own; experts stacked or one
by one; gate and up in one tensor or in two; norms under their own name or under that of the layer they are fused
with; the parts of a gated delta net. Pure: names and shapes, no tensors, no files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from megaswift.bridge.checkpoint.entries import ShardedStateDictEntry, sharded_state_dict_entry
from megaswift.bridge.plan import OUTPUT_LAYER, SHOWN, PlanEntry, WeightPlan
from megaswift.errors import Problem
from megaswift.models.weights.gated_delta import KeyHeadRowsRule

Shape = tuple[int, ...]
LAYER = re.compile(r"(?P<head>decoder\.layers\.)(?P<layer>\d+)\.(?P<rest>.*)")
EXPERTS = "mlp.experts.experts."
ALIASES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "self_attention.linear_proj.post_layernorm.weight": "self_attention.post_self_attn_layernorm.weight",
    "mlp.linear_fc2.post_layernorm.weight": "mlp.post_mlp_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attention.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attention.k_norm.weight",
}
"""Name within a layer -> its other name: modules with and without Transformer Engine fuse norms or do not, and ms-swift
has names of its own for norms after a projection and for norms over all heads."""
RENAMED = {
    "self_attention.conv1d_weight": "self_attention.conv1d.weight",
    "self_attention.out_norm_weight": "self_attention.out_norm.weight",
}
"""Name within a layer in this program alone -> its name in all others."""
MTP_LAYERS = (".transformer_layer.", ".mtp_model_layer.")
"""The decoder layer within a layer for multi-token prediction, before and since Megatron-Core 0.17."""
PREFIX = re.compile(r"(?:(?:model\d*|module|language_model)\.)+(?=(?:embedding|decoder|output_layer|mtp)\.)")
"""Put before the names of a model's parameters by some programs, for each virtual pipeline stage too."""
NOT_WEIGHTS = re.compile(
    r"(.*\.)?_extra_state\d*(/.*)?|(chained_\d+\.)?optimizer\..*|(rng_state|rerun_state_machine_state)(/.*)?"
)
"""What a checkpoint has besides weights: FP8 scaling histories, states of optimizers and of random generators."""
COMPONENTS = ("query", "key", "value", "z", "beta", "alpha")
"""The parts of a gated delta net's input projection, in Megatron-Core's order."""


@dataclass(frozen=True)
class Part:
    """A region of a parameter, and where it is stored."""

    key: str
    """The stored tensor."""
    corner: Shape
    """Where the region begins in the parameter."""
    shape: Shape
    """The region's extent there."""
    needed: Shape
    """The shape that the stored tensor must have."""
    at: Shape = ()
    """Leading indices in the stored tensor: the layer of a stack."""
    dropped: int = 0
    """Leading dimensions of the parameter that the stored tensor lacks: the expert's."""
    start: Shape = ()
    """Where the region begins in the stored tensor, behind `at`; empty: at its beginning."""


@dataclass(frozen=True)
class Placement:
    """The stored location of every parameter, by canonical key, and the problems found."""

    parts: Mapping[str, tuple[Part, ...]]
    problems: tuple[Problem, ...]


def without_prefix(stored: Mapping[str, Shape]) -> tuple[dict[str, str], list[str]]:
    """Return plain name -> stored name of all tensors that are weights, and the names that stand for the same one."""
    names: dict[str, str] = {}
    twice = []
    for name in stored:
        if NOT_WEIGHTS.fullmatch(name):
            continue
        plain = PREFIX.sub("", name, count=1)
        if plain in names:
            twice.append(name)
        names.setdefault(plain, name)
    return names, twice


class Search(Protocol):
    """Finds parameters among the stored tensors."""

    @property
    def names(self) -> Mapping[str, str]:
        """Name without a prefix -> stored tensor, of all weights."""

    @property
    def twice(self) -> Sequence[str]:
        """Stored tensors whose name without a prefix is another one's too."""

    @property
    def used(self) -> Collection[str]:
        """Stored tensors that a parameter was made of."""

    def parts(self, entries: Sequence[PlanEntry], region: ShardedStateDictEntry) -> list[Part]:
        """Return the parts of a parameter, of all experts together; empty where it is not stored."""

    def wrong_shapes(self, parts: Sequence[Part], entry: PlanEntry) -> Iterator[tuple[str, str]]:
        """Yield (stored tensor, what is wrong with its shape)."""

    def missing_rule(self, key: str) -> str:
        """Say that a parameter is not stored."""


def place(plan: WeightPlan, search: Search, folder: str) -> Placement:
    """Find every parameter of the plan among the stored tensors, each of which is used once.

    Args:
        plan: The model.
        search: Finds one parameter.
        folder: For messages.
    """
    by_key: dict[str, list[PlanEntry]] = {}
    for entry in plan.entries:
        by_key.setdefault(sharded_state_dict_entry(entry).key, []).append(entry)
    parts: dict[str, tuple[Part, ...]] = {}
    missing: list[Problem] = []
    wrong: dict[str, Problem] = {}
    for region_key, entries in by_key.items():
        found = search.parts(entries, sharded_state_dict_entry(entries[0]))
        parts[region_key] = tuple(found)
        if not found:
            rule = search.missing_rule(region_key)
            missing.append(Problem(f"{folder}, tensor {region_key}", rule, _missing_fix(entries[0])))
        for key, rule in search.wrong_shapes(found, entries[0]):
            wrong.setdefault(key, Problem(f"{folder}, tensor {key}", rule))
    extra = [name for plain, name in search.names.items() if name not in search.used and not _tied(plan, plain)]
    rule = f"is not in the weight table of {plan.family.name} for this config.json ({plan.spec.num_layers} layers)"
    unmapped = [Problem(f"{folder}, tensor {name}", rule) for name in sorted([*search.twice, *extra])]
    problems = [*missing[:SHOWN], *unmapped[:SHOWN], *[*wrong.values()][:SHOWN]]
    unshown = sum(max(0, len(kind) - SHOWN) for kind in (missing, unmapped, wrong))
    if unshown:
        problems.append(Problem(folder, f"and {unshown} more tensors like these"))
    return Placement(parts, tuple(problems))


def _tied(plan: WeightPlan, name: str) -> bool:
    """The copy of a tied embedding, which whoever reads it compares."""
    return plan.spec.tied and name == OUTPUT_LAYER


def _missing_fix(entry: PlanEntry) -> str:
    if entry.megatron == OUTPUT_LAYER:
        return "set tie_word_embeddings to true in config.json if the output layer is the embedding"
    return ""


class ShardedKeys:
    """Finds parameters among the tensors of a torch_dist checkpoint, in any of their forms."""

    def __init__(self, layers: int, stored: Mapping[str, Shape]) -> None:
        self.layers = layers
        self.stored = stored
        self.names, self.twice = without_prefix(stored)
        self.used: set[str] = set()

    def parts(self, entries: Sequence[PlanEntry], region: ShardedStateDictEntry) -> list[Part]:
        """Return the parts of a parameter, in the first of its possible forms that is stored."""
        for name, at in self._forms(region.key):
            found = self._of_name(name, at, entries[0], region)
            if found:
                self.used.update(part.key for part in found)
                return found
        return []

    def missing_rule(self, key: str) -> str:
        """Say that a parameter is not stored, alone or in the stack of all layers."""
        match = LAYER.fullmatch(key)
        stack = f", and neither is {match['head']}{match['rest']}, the stack of all layers" if match else ""
        return f"is missing from the checkpoint{stack}"

    def wrong_shapes(self, parts: Sequence[Part], entry: PlanEntry) -> Iterator[tuple[str, str]]:
        """Yield (stored tensor, what is wrong with its shape)."""
        for part in parts:
            shape = self.stored[part.key]
            padded = entry.shard == "vocab" and shape[1:] == part.needed[1:] and shape[:1] >= part.needed[:1]
            if shape != part.needed and not padded:
                yield part.key, f"has shape {list(shape)}, but config.json requires {list(part.needed)}"

    def _forms(self, key: str) -> Iterator[tuple[str, Shape]]:
        """(name, leading indices) under which a parameter may be stored."""
        match = LAYER.fullmatch(key)
        if match is None:
            yield from ((name, ()) for name in names_of(key))
            return
        for rest in _with_alias(match["rest"]):
            yield f"{match['head']}{match['layer']}.{rest}", ()
            yield f"{match['head']}{rest}", (int(match["layer"]),)

    def _of_name(self, name: str, at: Shape, entry: PlanEntry, region: ShardedStateDictEntry) -> list[Part]:
        """The parts of a parameter with this name: whole, by experts, by gate and up, by components."""
        whole = region.whole
        if isinstance(entry.rule, KeyHeadRowsRule) and entry.rule.by_component:
            return self._components(name, at, entry.rule.component_rows(entry.spec), whole)
        if name in self.names:
            extent = self._extent(name, at, entry, whole)
            return [Part(self.names[name], (0,) * len(whole), extent, self._stacked(at, whole), at)]
        if halves := self._halves(name, at, (0,) * len(whole), whole, 1 if entry.expert is not None else 0):
            return halves
        if entry.expert is not None:
            return self._experts(name, at, whole)
        return []

    def _extent(self, name: str, at: Shape, entry: PlanEntry, whole: Shape) -> Shape:
        """The whole parameter; of a vocabulary with the padding that is stored."""
        shape = self.stored[self.names[name]]
        return (shape[0], *whole[1:]) if entry.shard == "vocab" and not at and len(shape) == len(whole) else whole

    def _experts(self, name: str, at: Shape, whole: Shape) -> list[Part]:
        """Experts one by one; none where one of them is missing."""
        found = []
        for expert in range(whole[0]):
            own = name.replace(EXPERTS, f"{EXPERTS}{expert}.")
            corner = (expert, *(0 for _ in whole[1:]))
            shape = (1, *whole[1:])
            if own in self.names:
                found.append(Part(self.names[own], corner, shape, self._stacked(at, whole[1:]), at, 1))
            elif halves := self._halves(own, at, corner, shape, 1, 1):
                found += halves
            else:
                return []
        return found

    def _halves(self, name: str, at: Shape, corner: Shape, shape: Shape, dim: int, dropped: int = 0) -> list[Part]:
        """Gate and up as two tensors."""
        names = [f"{name}{end}" for end in ("_w", "_v")]
        if not all(each in self.names for each in names):
            return []
        rows = shape[dim] // 2
        half = (*shape[:dim], rows, *shape[dim + 1 :])
        corners = [corner, (*corner[:dim], rows, *corner[dim + 1 :])]
        needed = self._stacked(at, half[dropped:])
        return [Part(self.names[each], c, half, needed, at, dropped) for each, c in zip(names, corners, strict=True)]

    def _components(self, name: str, at: Shape, rows: Sequence[int], whole: Shape) -> list[Part]:
        """A gated delta net's queries, keys, values, ... as tensors of their own."""
        names = [f"{name}.{component}" for component in COMPONENTS[: len(rows)]]
        if not all(each in self.names for each in names):
            return []
        found = []
        row = 0
        for each, count in zip(names, rows, strict=True):
            shape = (count, *whole[1:])
            corner = (row, *(0 for _ in whole[1:]))
            found.append(Part(self.names[each], corner, shape, self._stacked(at, shape), at))
            row += count
        return found

    def _stacked(self, at: Shape, shape: Shape) -> Shape:
        """The shape of a tensor of one layer, or of the stack of all."""
        return (self.layers, *shape) if at else shape


def names_of(key: str) -> Iterator[str]:
    """Yield the names of a parameter where layers are not stacked."""
    if (match := LAYER.fullmatch(key)) is not None:
        yield from (f"{match['head']}{match['layer']}.{rest}" for rest in _with_alias(match["rest"]))
        return
    for layer in MTP_LAYERS:
        yield from _with_alias(key.replace(MTP_LAYERS[0], layer), layer)


def _with_alias(rest: str, layer: str = "") -> Iterator[str]:
    """A name, and its other one. `layer`: what stands before the part that has another name."""
    head, middle, tail = rest.partition(layer) if layer else ("", "", rest)
    yield f"{head}{middle}{RENAMED.get(tail, tail)}"
    if tail in ALIASES:
        yield f"{head}{middle}{ALIASES[tail]}"
