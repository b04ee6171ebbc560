"""A new scalar head on a language model: a source of the model's weights and a head drawn from the seed.

Owns that draw, the same for all engines and layouts, and the view over the model's files and it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megaswift.bridge.hf.source import Slices, WeightSource
from megaswift.bridge.initial_weights import seeded_normal
from megaswift.models.spec import ModelSpec

NEW = "score.weight"


def new_scalar_head_weight(spec: ModelSpec, seed: int) -> Tensor:
    """Draw the weight of a new scalar head, float32 [1, h], as transformers initializes a linear layer of this model,
    or as the spec says."""
    std = spec.hf_config.get("initializer_range", 0.02) if spec.new_head_std is None else spec.new_head_std
    return seeded_normal(NEW, (1, spec.hidden_size), float(std), seed)


class NewScalarHeadSource:
    """`base` and, under the name `NEW`, `head`. A WeightSource."""

    def __init__(self, base: WeightSource, head: Tensor) -> None:
        self.base = base
        self.head = head
        self.directory = base.directory

    @property
    def bytes_read(self) -> int:
        """The bytes read from the base."""
        return self.base.bytes_read

    def names(self) -> list[str]:
        """Return the names of the base's tensors and of the new one."""
        return [*self.base.names(), NEW]

    def slice(self, name: str, where: Slices = ()) -> Tensor:
        """Return a part of a tensor."""
        return self.head[tuple(where)] if name == NEW else self.base.slice(name, where)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self.head.dtype if name == NEW else self.base.dtype(name)

    def dtype_name(self, name: str) -> str:
        """Return the dtype of a tensor as a file spells it."""
        return "F32" if name == NEW else self.base.dtype_name(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self.head.shape) if name == NEW else self.base.shape(name)

    def file(self, name: str) -> Path:
        """Return the file that holds a tensor; for the new tensor the folder."""
        return self.directory if name == NEW else self.base.file(name)

    def close(self) -> None:
        """Close the files."""
        self.base.close()
