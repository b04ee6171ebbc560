"""Where the parts of a checkpoint lie, from any path that a user may give. Names only: no torch, no tensor is read.

DST/.metadata, DST/model/            made by `megaswift convert hf-to-megatron`
STEP/engine/.metadata, STEP/model/   saved by a run on the native engine
STEP/engine/state/, STEP/model/      saved by a run on the torch engine
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
WHOLE = "state"
"""Within the engine's folder: safetensors of whole tensors, which the torch engine writes."""
FACTS = "engine.json"
"""Within the engine's folder: what wrote it."""
MARKER, POINTER = "manifest.json", "latest.json"
STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """The two parts."""

    tensors: Path
    """The torch_dist folder; of the torch engine the folder of `WHOLE`."""
    model: Path
    """config.json, tokenizer and what else makes it a model."""

    @property
    def sharded(self) -> bool:
        """Whether it is Megatron's format, and not the torch engine's."""
        return (self.tensors / TABLES).is_file()


def find_checkpoint(path: Path | str) -> Checkpoint | None:
    """The checkpoint at `path`; None where there is none.

    A converted folder, a `step-N`, an output directory or its `checkpoints` (meaning the latest), the `model` folder of
    any of these.
    """
    folder = Path(path)
    owner = folder.parent if folder.name == MODEL else folder
    for tensors in (owner, owner / ENGINE):
        if (tensors / TABLES).is_file():
            return Checkpoint(tensors, owner / MODEL)
    if (owner / ENGINE / WHOLE).is_dir():
        return Checkpoint(owner / ENGINE, owner / MODEL)
    latest = _latest(folder / "checkpoints") or _latest(folder)
    return find_checkpoint(latest) if latest else None


def _latest(store: Path) -> Path | None:
    """The step folder that the pointer names, if it has its marker. What the marker says is checked by who resumes from
    it."""
    try:
        name = str(json.loads((store / POINTER).read_text(encoding="utf-8"))["directory"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return store / name if STEP.fullmatch(name) and (store / name / MARKER).is_file() else None
