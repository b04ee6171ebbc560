"""A new head on a language model: a source of the model's weights and a head drawn from the seed.

Owns that draw, the same for all engines and layouts, and the view over the model's files and it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaswift.bridge.hf.source import Slices, WeightSource
from megaswift.bridge.initial_weights import seeded_normal
from megaswift.models.heads import BIAS, NEW
from megaswift.models.spec import ModelSpec

POOLER = "pooler"
"""The layer behind an encoder's first token: before the head of a classifier of texts, and not part of an embedding."""


def new_head_weight(spec: ModelSpec, seed: int) -> Tensor:
    """Draw the weight of a new classifier's head, float32 [labels, h], as transformers initializes a linear layer of
    this model, or as the spec says."""
    std = spec.hf_config.get("initializer_range", 0.02) if spec.new_head_std is None else spec.new_head_std
    return seeded_normal(NEW, (spec.labels, spec.hidden_size), float(std), seed)


def encoder_head_names(model: Any, names: Iterable[str]) -> set[str]:
    """Return those of some parameters of transformers' encoder that a folder may lack, and that transformers draws: of
    the head, and of the pooler."""
    prefix = f"{model.base_model_prefix}."
    bare = model.base_model is model
    return {name for name in names if f".{POOLER}." in f".{name}" or not (bare or name.startswith(prefix))}


def with_new_head(source: WeightSource, spec: ModelSpec, seed: int) -> WeightSource:
    """Return the weights with a new head, if the model has a head and `source` has none."""
    if not spec.scored or NEW in source.names():
        return source
    tensors = {NEW: new_head_weight(spec, seed)}
    if spec.score_bias:
        tensors[BIAS] = torch.zeros(spec.labels)
    return NewHeadSource(source, tensors)


class NewHeadSource:
    """`base` and the tensors of a head, by name. A WeightSource."""

    def __init__(self, base: WeightSource, head: Mapping[str, Tensor]) -> None:
        self.base = base
        self.head = head
        self.directory = base.directory

    @property
    def bytes_read(self) -> int:
        """The bytes read from the base."""
        return self.base.bytes_read

    def names(self) -> list[str]:
        """Return the names of the base's tensors and of the new ones."""
        return [*self.base.names(), *self.head]

    def slice(self, name: str, where: Slices = ()) -> Tensor:
        """Return a part of a tensor."""
        return self.head[name][tuple(where)] if name in self.head else self.base.slice(name, where)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self.head[name].dtype if name in self.head else self.base.dtype(name)

    def dtype_name(self, name: str) -> str:
        """Return the dtype of a tensor as a file spells it."""
        return "F32" if name in self.head else self.base.dtype_name(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self.head[name].shape) if name in self.head else self.base.shape(name)

    def file(self, name: str) -> Path:
        """Return the file that holds a tensor; for new tensors the folder."""
        return self.directory if name in self.head else self.base.file(name)

    def close(self) -> None:
        """Close the files."""
        self.base.close()
