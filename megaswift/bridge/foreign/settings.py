"""Options that ms-swift and Megatron-Bridge write beside their checkpoints, read as plain data.

The entries _target_ and _call_ in Megatron-Bridge's file name Python objects: they are texts here, and nothing is
imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megaswift.base.plain_files import read_plain_file
from megaswift.errors import CheckpointError, Problem, first_line
from megaswift.folders.foreign import ForeignFolder

SWIFT = "args.json"
BRIDGE = "run_config.yaml"
LARGEST = 1 << 24
"""Bytes of such a file."""


@dataclass(frozen=True)
class AdapterOptions:
    """Settings of adapters that do not follow from their shapes."""

    file: Path
    alpha: float
    rank: int
    dropout: float = 0.0
    rslora: bool = False
    tp: int = 1
    """Tensor-parallel ranks whose parts of a fused layer's B lie one after the other."""


def read_options(path: Path) -> Mapping[str, Any]:
    """Read a JSON or YAML file of options; a CheckpointError where it holds no mapping."""
    try:
        data = read_plain_file(path, LARGEST)
        values = json.loads(data) if path.suffix == ".json" else yaml.safe_load(data)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise CheckpointError(Problem(str(path), f"cannot be read ({first_line(error)})")) from None
    if not isinstance(values, dict):
        raise CheckpointError(Problem(str(path), "must be a mapping of options"))
    return values


def adapter_options(folder: ForeignFolder, bridge: bool) -> AdapterOptions:
    """Read the options of the adapters in a checkpoint.

    Args:
        folder: The checkpoint.
        bridge: Whether its tensors have Megatron-Bridge's names; else ms-swift's.
    """
    name = BRIDGE if bridge else SWIFT
    places = [folder.tensors / name, folder.root / name]
    file = next((path for path in places if path.exists()), None)
    if file is None:
        rule = f"has adapters, but no {name}, which holds their alpha"
        raise CheckpointError(Problem(str(folder.tensors), rule, f"copy {name} from the run's folder"))
    values = read_options(file)
    if bridge:
        peft = values.get("peft")
        if not isinstance(peft, dict) or str(peft.get("_target_", "LoRA")).rpartition(".")[2] != "LoRA":
            raise CheckpointError(Problem(str(file), "has no section peft of LoRA", "only LoRA is read"))
        return _checked(file, {**peft, "rank": peft.get("dim", 32), "alpha": peft.get("alpha", 32)})
    if values.get("use_dora"):
        raise CheckpointError(Problem(f"{file}, use_dora", "is true; only LoRA is read"))
    found = {
        "rank": values.get("lora_rank", 8),
        "alpha": values.get("lora_alpha", 32),
        "dropout": values.get("lora_dropout", 0.0),
        "rslora": values.get("use_rslora", False),
        "tp": values.get("tensor_model_parallel_size", 1),
    }
    return _checked(file, found)


def _checked(file: Path, found: Mapping[str, Any]) -> AdapterOptions:
    """The options, where each has its type."""
    numbers = {name: found.get(name, 0) for name in ("rank", "alpha", "dropout", "tp")}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**31:
            raise CheckpointError(Problem(f"{file}, {name} {value!r:.40}", "must be a number of at least 0"))
    rank = int(numbers["rank"])
    return AdapterOptions(
        file,
        float(numbers["alpha"]),
        max(1, rank),
        float(numbers["dropout"]),
        found.get("rslora") is True,
        max(1, int(numbers["tp"])),
    )
