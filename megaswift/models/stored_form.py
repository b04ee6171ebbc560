"""What a model's folder does not say in its config.json: whether one tensor has all experts of a layer, and whether
layers for multi-token prediction train. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megaswift.base.plain_files import read_plain_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CHECKPOINT_FACTS = "weights.json"
"""In the model folder of a checkpoint (`bridge/checkpoint/hf_metadata.py`)."""
STACKED = "stacked_experts"
"""The condition of the rules for such tensors."""
STACK = re.compile(r"(model\.)?(language_model\.)?layers\.\d+\.mlp\.experts\.gate_up_proj")
MTP_STACK = re.compile(r"mtp\.layers\.\d+\.mlp\.experts\.gate_up_proj")
"""Those of multi-token prediction, which may have the other form."""
LONGEST_HEADER = 100_000_000
"""Bytes; safetensors allows no longer header."""


@dataclass(frozen=True)
class StoredForm:
    """What the weights of a folder or of a checkpoint are, besides what config.json says. The fields are those of
    `ArchitectureExtras`."""

    stacked_experts: bool = False
    mtp_stacked_experts: bool = False
    mtp_layers: int = 0
    """Of a checkpoint: how many layers for multi-token prediction are part of its model."""

    @classmethod
    def of_names(cls, names: Collection[str]) -> StoredForm:
        """Return the form of a Hugging Face folder with tensors of these names."""
        return cls(any(map(STACK.fullmatch, names)), any(map(MTP_STACK.fullmatch, names)))

    @classmethod
    def of(cls, features: Any) -> StoredForm:
        """Return the form of a model with these `ArchitectureExtras`."""
        return cls(**{name.name: getattr(features, name.name) for name in fields(cls)})

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint's `weights.json` says: all that is not the default. `read_stored_form` reads it."""
        return {name.name: value for name in fields(self) if (value := getattr(self, name.name)) != name.default}


def read_stored_form(folder: Path) -> StoredForm | None:
    """Read the form of a folder's weights; None where it has no weights, or damaged ones, which whoever reads them
    reports."""
    try:
        if (folder / CHECKPOINT_FACTS).exists():
            facts = json.loads(read_plain_file(folder / CHECKPOINT_FACTS))
            return StoredForm(**{f.name: facts[f.name] for f in fields(StoredForm) if f.name in facts})
        names = _names(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return StoredForm.of_names(names) if names else None


def _names(folder: Path) -> Collection[str]:
    if (folder / INDEX).exists():
        index: Any = json.loads(read_plain_file(folder / INDEX))["weight_map"]
        return list(index)
    if not (folder / SINGLE).exists():
        return ()
    with (folder / SINGLE).open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return list(json.loads(file.read(length))) if length <= LONGEST_HEADER else ()
