"""Which parameters of a weight table a model has, and how large a rank's part of each is.

Owns the expansion of rules to layers and experts, and the sizes of shards. Pure: names and shapes, no tensors, no
torch; reading and writing the tensors is the bridge's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from megaswift.models.spec import ModelSpec
from megaswift.models.weights.rules import TensorParallelShard, WeightRule, shard_dim

Place = tuple[WeightRule, int | None, int | None]
"""(rule, layer, global number of the expert)."""
VOCABULARY_MULTIPLE = 8
"""Rows of a rank's vocabulary shard are padded to this multiple (tensor cores)."""


def padded_vocabulary_size(spec: ModelSpec, tp: int) -> int:
    """Vocabulary rows in all, so that each rank has the same number of them."""
    multiple = VOCABULARY_MULTIPLE * tp if tp > 1 else 1
    return math.ceil(spec.vocab_size / multiple) * multiple


def weight_rule_applies(rule: WeightRule, spec: ModelSpec) -> bool:
    """Whether this model has what the rule is about."""
    return not rule.when or bool(getattr(spec, rule.when))


def format_rule_name(pattern: str, layer: int | None, expert: int | None) -> str:
    """A rule's name for one layer and expert."""
    return pattern.replace("{L}", str(layer)).replace("{E}", str(expert))


def shard_shape(rule: WeightRule, spec: ModelSpec, shard: TensorParallelShard) -> tuple[int, ...]:
    """Shape of a rank's shard of a parameter."""
    dim = shard_dim(rule)
    pieces = rule.pieces(spec, shard)
    shape = list(pieces[0].shape(rule.shapes(spec)[pieces[0].source], dim))
    shape[dim] = sum(p.length for p in pieces)
    return tuple(shape)


def expand_weight_table(rules: Sequence[WeightRule], spec: ModelSpec) -> Iterator[Place]:
    """Every parameter of a model with the rule for it, in export order: layer by layer, and expert by expert within a
    layer."""
    active = [rule for rule in rules if weight_rule_applies(rule, spec)]
    for in_model, block in groupby(active, key=lambda rule: rule.scope == "model"):
        chosen = list(block)
        if in_model:
            yield from ((rule, None, None) for rule in chosen)
            continue
        for layer, kind in enumerate(spec.layer_kinds):
            yield from expand_layer([rule for rule in chosen if rule.scope in kind.scopes], layer, spec)


def expand_layer(rules: Sequence[WeightRule], layer: int, spec: ModelSpec) -> Iterator[Place]:
    """Yield the parameters of one layer, to which all `rules` apply, with the rule for each."""
    for in_expert, part in groupby(rules, key=lambda rule: rule.scope == "expert"):
        same = list(part)
        experts = range(spec.experts) if in_expert else (None,)
        # a stacked tensor is filled at a stretch
        for rules_of in [[rule] for rule in same] if same[0].stacked else [same]:
            yield from ((rule, layer, expert) for expert in experts for rule in rules_of)
