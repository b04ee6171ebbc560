"""Which modules of any transformers model are its decoder layers: FSDP's units, what is compiled, and what one device
has as a whole."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def decoder_layer_class_names(model: nn.Module) -> frozenset[str]:
    """Class names of decoder layers: what transformers says must stay in one piece, else the members of the longest
    list of modules."""
    declared: Iterable[str] = getattr(model, "_no_split_modules", None) or ()
    present = {type(m).__name__ for m in model.modules()}
    layer_classes = frozenset(declared) & present
    if layer_classes:
        return layer_classes
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    longest = max(lists, key=len, default=None)
    return frozenset({type(longest[0]).__name__}) if longest is not None else frozenset()
