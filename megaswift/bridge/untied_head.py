"""A model with tied embeddings as one whose output layer is a tensor of its own: PEFT trains a copy of either alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megaswift.bridge.hf.source import Slices, WeightSource
from megaswift.bridge.hf.stored_names import EMBEDDING, OUTPUT
from megaswift.models.spec import ModelSpec


def untied_spec(spec: ModelSpec) -> ModelSpec:
    """Describe the same model with an output layer of its own."""
    return replace(spec, tied=False, hf_config=untied_config(spec.hf_config))


def untied_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the untied model; a vision-language model has the field in both places."""
    changed = {**config, "tie_word_embeddings": False}
    inner = config.get("text_config")
    return {**changed, "text_config": {**inner, "tie_word_embeddings": False}} if isinstance(inner, dict) else changed


def untie_adapted_modules(model: nn.Module) -> None:
    """Give each module that has an adapter of PEFT's, and shares its weight with another, a weight of its own."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for shared in names.values():
        if any(".base_layer." in name for name in shared):
            for name in shared[1:]:
                module, _, own = name.rpartition(".")
                weight = model.get_parameter(name)
                setattr(model.get_submodule(module), own, nn.Parameter(weight.detach().clone(), weight.requires_grad))


class UntiedSource:
    """`base` with the embedding as `lm_head.weight` too. A WeightSource."""

    def __init__(self, base: WeightSource) -> None:
        self.base = base
        self.directory = base.directory

    @property
    def bytes_read(self) -> int:
        """The bytes read from the base."""
        return self.base.bytes_read

    def names(self) -> list[str]:
        """Return the names of the base's tensors and of the output layer."""
        return list(dict.fromkeys([*self.base.names(), OUTPUT]))

    def slice(self, name: str, where: Slices = ()) -> Tensor:
        """Return a part of a tensor."""
        return self.base.slice(_stored(name), where)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self.base.dtype(_stored(name))

    def dtype_name(self, name: str) -> str:
        """Return the dtype of a tensor as a file spells it."""
        return self.base.dtype_name(_stored(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.base.shape(_stored(name))

    def file(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self.base.file(_stored(name))

    def close(self) -> None:
        """Close the files."""
        self.base.close()


def _stored(name: str) -> str:
    return EMBEDDING if name == OUTPUT else name
