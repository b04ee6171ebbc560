"""Conversion between the parameters of a transformers model and the tensors of its files, a few at a time.

transformers owns the conversions (stacked experts, fused projections, older names: `core_model_loading`). This module
cuts them into pieces that can be read, or written, without the rest of the model, so that no process ever holds more
than one piece whole.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megaswift.bridge.hf.model_folder import WholeShapes
from megaswift.bridge.hf.source import WeightSource
from megaswift.engine.torch.adapters.peft_names import name_without_adapters

IGNORED_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""What older files have and transformers ignores for every model."""


@dataclass(frozen=True)
class ConversionGroup:
    """Tensors of files, and the parameters (or buffers) that they become together."""

    stored: tuple[tuple[str, str], ...]
    """(Pattern of the conversion that takes it, name in the files)."""
    target: str
    """The parameter; of several, transformers' name for all."""
    conversion: Any = None
    """transformers' converter, not to be used up; None: a tensor that is a parameter as it is."""

    def convert(self, model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters by name, from the stored tensors by name."""
        if self.conversion is None:
            return {self.target: tensors[self.stored[0][1]]}
        once = copy.deepcopy(self.conversion)
        for pattern, name in self.stored:
            once.add_tensor(self.target, name, pattern, tensors[name])
        return {
            name: converted[0] if isinstance(converted, list) else converted
            for name, converted in once.convert(self.target, model=WholeShapes(model), config=model.config).items()
        }


def conversion_groups(model: Any, source: WeightSource) -> list[ConversionGroup]:
    """What of `source` belongs to a transformers model, in the order in which transformers reads it.

    The model also learns which conversions its files took, as `from_pretrained` teaches it, so that it is written as it
    was read.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    own_names = {name_without_adapters(name) for name in model.state_dict()}
    prefix = model.base_model_prefix
    lookup = dict.fromkeys(own_names, True)
    mapping = get_model_conversion_mapping(model)
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters: Any = [m for m in mapping if isinstance(m, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    renamed: dict[str, list[tuple[str, str]]] = {}
    how: dict[str, Any] = {}
    for name in sorted(source.names(), key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, lookup)
        if target not in own_names and name in own_names:
            target, pattern = rename_source_key(name, [], [], prefix, lookup)
        if target in own_names:
            how.setdefault(target, None if pattern is None else of_pattern[pattern])
            renamed.setdefault(target, []).append((pattern or name, name))
    model._weight_conversions = [m for m in mapping if m.was_used()]
    return [ConversionGroup(tuple(stored), target, how[target]) for target, stored in renamed.items()]


def unused_weights(model: Any, source: WeightSource, groups: Iterable[ConversionGroup]) -> set[str]:
    """Tensors of files in none of the pieces, without those that the model's class says to ignore."""
    ignored = {*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), *IGNORED_BUFFERS}
    unused = set(source.names()) - {name for piece in groups for _, name in piece.stored}
    return {name for name in unused if not any(re.search(pattern, name) for pattern in ignored)}


def converted_parameter_shapes(
    model: Any, source: WeightSource, groups: Iterable[ConversionGroup]
) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter that the pieces make; nothing is read."""
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in groups:
        metas = {name: torch.empty(source.shape(name), device="meta") for _, name in piece.stored}
        shapes |= {name: tuple(t.shape) for name, t in piece.convert(model, metas).items()}
    return shapes


def jointly_written_parameters(model: Any, names: Iterable[str]) -> list[tuple[str, ...]]:
    """Parameters in groups that must be written together, because they come from, or become, the same tensors of
    files."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    conversions = getattr(model, "_weight_conversions", None)
    conversions = get_model_conversion_mapping(model, add_legacy=False) if conversions is None else conversions
    backwards: Any = [c.reverse_transform() for c in conversions[::-1] if isinstance(c, WeightConverter)]
    names_of: dict[str, list[str]] = {}
    for name in names:
        together, pattern = rename_source_key(name, [], backwards)
        names_of.setdefault(together if pattern is not None else name, []).append(name)
    return [tuple(group) for group in names_of.values()]


def tied_name_map(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter, without adapters -> the one that comes first: another where it is tied."""
    name_of: dict[int, str] = {}
    first_of: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = name_of.setdefault(id(parameter), name_without_adapters(name))
        first_of.setdefault(
            name_without_adapters(name), first
        )  # PEFT's copy of a module that trains comes after the module
    return first_of
