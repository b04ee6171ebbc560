"""A family's weight table, written out over the layers and experts of one model: which rule stands for which parameter.

Owns the order, which is that of export, and the full names. Pure: names only, no shapes, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from megaswift.families.rules import Rule
from megaswift.families.spec import ModelSpec

Place = tuple[Rule, int | None, int | None]
"""(rule, layer, global number of the expert)."""


def in_use(rule: Rule, spec: ModelSpec) -> bool:
    """Whether this model has what the rule is about."""
    return not rule.when or bool(getattr(spec, rule.when))


def full_name(pattern: str, layer: int | None, expert: int | None) -> str:
    """A rule's name for one layer and expert."""
    return pattern.replace("{L}", str(layer)).replace("{E}", str(expert))


def expand_table(rules: Sequence[Rule], spec: ModelSpec) -> Iterator[Place]:
    """Every parameter, layer by layer, and expert by expert within a layer."""
    active = [rule for rule in rules if in_use(rule, spec)]
    for in_model, block in groupby(active, key=lambda rule: rule.scope == "model"):
        chosen = list(block)
        if in_model:
            yield from ((rule, None, None) for rule in chosen)
            continue
        for layer, sparse in enumerate(spec.moe_layers):
            scopes = ("layer", "moe", "expert") if sparse else ("layer", "dense")
            of_layer = [rule for rule in chosen if rule.scope in scopes]
            for in_expert, part in groupby(of_layer, key=lambda rule: rule.scope == "expert"):
                same = list(part)
                experts = range(spec.experts) if in_expert else (None,)
                # a stacked tensor is filled at a stretch
                for rules_of in [[rule] for rule in same] if same[0].stacked else [same]:
                    yield from ((rule, layer, expert) for expert in experts for rule in rules_of)
