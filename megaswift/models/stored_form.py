"""How a folder stores a model's experts, which its config.json does not say: one tensor of a layer's experts, or one of
each expert. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from megaswift.base.plain_files import read_plain_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CHECKPOINT_FACTS = "weights.json"
"""In the model folder of a checkpoint (`bridge/checkpoint/hf_metadata.py`)."""
STACKED = "stacked_experts"
"""The field of these facts, and the name of the rules' condition."""
STACK = re.compile(r"(model\.)?(language_model\.)?layers\.\d+\.mlp\.experts\.gate_up_proj")
"""Not those of multi-token prediction, which may have the other form."""
LONGEST_HEADER = 100_000_000
"""Bytes; safetensors allows no longer header."""


def has_stacked_experts(names: Iterable[str]) -> bool:
    """Whether tensors of these names have all experts of a layer."""
    return any(STACK.fullmatch(name) for name in names)


def stored_experts_form(folder: Path) -> bool | None:
    """Whether the folder's experts are stacked; None where it has no weights, or damaged ones, which whoever reads them
    reports."""
    try:
        if (folder / CHECKPOINT_FACTS).exists():
            return bool(json.loads(read_plain_file(folder / CHECKPOINT_FACTS)).get(STACKED))
        names = _names(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return has_stacked_experts(names) if names else None


def _names(folder: Path) -> Collection[str]:
    if (folder / INDEX).exists():
        index: Any = json.loads(read_plain_file(folder / INDEX))["weight_map"]
        return list(index)
    if not (folder / SINGLE).exists():
        return ()
    with (folder / SINGLE).open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return list(json.loads(file.read(length))) if length <= LONGEST_HEADER else ()
