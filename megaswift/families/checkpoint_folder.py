"""Where the parts of a Megatron checkpoint lie, from any path that a user may give. Names only: no torch, no tensor is read.

    DST/.metadata, DST/model/            made by `megaswift convert hf-to-megatron`
    STEP/engine/.metadata, STEP/model/   saved by a run
    STEP/manifest.json                   written last: the step is whole
    OUT/checkpoints/latest.json          names a run's latest
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

TABLES = ".metadata"
"""Which boxes of which tensors lie in which file: torch.distributed.checkpoint's name."""
MODEL, ENGINE = "model", "engine"
MARKER, POINTER = "manifest.json", "latest.json"
STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """The two parts."""

    tensors: Path
    """The torch_dist folder."""
    model: Path
    """config.json, tokenizer and what else makes it a model."""


def find_checkpoint(path: Path | str) -> Checkpoint | None:
    """The checkpoint at `path`; None where there is none.

    A converted folder, a `step-N`, an output directory or its `checkpoints` (meaning the latest), the `model` folder of any of these.
    """
    folder = Path(path)
    owner = folder.parent if folder.name == MODEL else folder
    for tensors in (owner, owner / ENGINE):
        if (tensors / TABLES).is_file():
            return Checkpoint(tensors, owner / MODEL)
    latest = _latest(folder / "checkpoints") or _latest(folder)
    return find_checkpoint(latest) if latest else None


def _latest(store: Path) -> Path | None:
    """The step folder that the pointer names, if it has its marker. What the marker says is checked by who resumes from it."""
    try:
        name = str(json.loads((store / POINTER).read_text(encoding="utf-8"))["directory"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return store / name if STEP.fullmatch(name) and (store / name / MARKER).is_file() else None
