"""Hugging Face folders for the bridge's tests: published architectures made tiny, and files damaged on purpose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megaswift.bridge import HfSource, WeightPlan
from megaswift.families import family_of, read_config
from tests.parity.models import VARIANTS, build

EXTRA: dict[str, dict[str, Any]] = {
    "llama-tied": {"base": "llama", "tie_word_embeddings": True}, "mistral-tied": {"base": "mistral", "tie_word_embeddings": True},
    "qwen2-tied": {"base": "qwen2", "tie_word_embeddings": True}, "mixtral-tied": {"base": "mixtral", "tie_word_embeddings": True},
    "llama-wide-heads": {"base": "llama", "head_dim": 40}, "mixtral-wide-heads": {"base": "mixtral", "head_dim": 24},
    "llama-mha": {"base": "llama", "num_key_value_heads": 8},
    "qwen3-yarn-mha": {"base": "qwen3-yarn", "num_key_value_heads": 8},
}
for _name, _changes in EXTRA.items():
    _type, _fields = VARIANTS[_changes["base"]]
    VARIANTS.setdefault(_name, (_type, {**_fields, **{k: v for k, v in _changes.items() if k != "base"}}))


def make(variant: str, root: Path, dtype: torch.dtype = torch.float32) -> Path:
    """The variant's folder below `root`, in several shards; made once."""
    return build(variant, root / f"{variant}-{str(dtype).removeprefix('torch.')}", dtype)


def plan_of(folder: Path) -> WeightPlan:
    """The weight plan of a folder's config.json."""
    config = read_config(folder)
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
