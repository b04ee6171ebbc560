"""The order of rows in fused layers, in which programs differ under the same names and shapes.

Megatron-Core has the query heads of a group and then their gates, and of a gated delta net all queries, all keys, all
values, and so on. ms-swift (mcore-bridge) has each query head with its gate, as Hugging Face does, and of a gated delta
net one key head after the other, as this program does.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from megaswift.bridge.foreign.settings import SWIFT
from megaswift.folders.foreign import ForeignFolder
from megaswift.models.family import Family
from megaswift.models.weights.gated_delta import KeyHeadRowsRule
from megaswift.models.weights.rules import FusedGatedQKVRule, WeightRule

_DELTA_NET = "self_attention.in_proj.weight"


def is_of_swift(folder: ForeignFolder, names: Collection[str]) -> bool:
    """Return whether ms-swift wrote a checkpoint.

    Args:
        folder: The checkpoint.
        names: Its tensors. Those of gated delta nets tell: Megatron-Core cuts their input projections up. Without them
            it is ms-swift's file of options.
    """
    if folder.legacy:
        return False
    if any(_DELTA_NET in name for name in names):
        return any(name.endswith(_DELTA_NET) for name in names)
    return any((place / SWIFT).exists() for place in (folder.tensors, folder.root))


def family_with_rows(family: Family, swift: bool) -> Family:
    """Return a family with the order of rows of ms-swift, or of Megatron-Core."""

    def changed(rule: WeightRule) -> WeightRule:
        if isinstance(rule, FusedGatedQKVRule):
            return replace(rule, alternating=swift)
        if isinstance(rule, KeyHeadRowsRule):
            return replace(rule, by_component=not swift)
        return rule

    return replace(family, weights=tuple(changed(rule) for rule in family.weights))
