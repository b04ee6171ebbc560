"""Hugging Face folders for the bridge's tests: published architectures made tiny, and files damaged on purpose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megaswift.bridge import HfSource, WeightPlan
from megaswift.families import family_of, read_config_json
from tests.parity.models import build


def make(variant: str, root: Path, dtype: torch.dtype = torch.float32) -> Path:
    """The variant's folder below `root`, in several shards; made once."""
    return build(variant, root / f"{variant}-{str(dtype).removeprefix('torch.')}", dtype)


def plan_of(folder: Path) -> WeightPlan:
    """The weight plan of a folder's config.json."""
    config = read_config_json(folder)
    family = family_of(config)
    return WeightPlan(family, family.spec(config))


def opened(folder: Path) -> tuple[WeightPlan, HfSource]:
    """Plan and source, checked."""
    plan, source = plan_of(folder), HfSource(folder)
    plan.check(source)
    return plan, source


def rewrite(folder: Path, tensors: dict[str, Tensor]) -> None:
    """One file instead of what is there."""
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        path.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors, read by the safetensors library, not by us."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(load_file(path))
    return found


def index_of(folder: Path) -> dict[str, Any]:
    """The index as JSON."""
    return json.loads((folder / "model.safetensors.index.json").read_text())


def set_index(folder: Path, name: str, file: str) -> None:
    """Point one tensor at another file."""
    index = index_of(folder)
    index["weight_map"][name] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def set_config(folder: Path, **changes: Any) -> None:
    """Change fields of config.json."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
