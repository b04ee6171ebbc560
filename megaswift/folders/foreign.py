"""Checkpoints that Megatron-LM, ms-swift and Megatron-Bridge wrote: which folder holds the tensors. Names only.

ROOT/latest_checkpointed_iteration.txt   the number of the newest iteration, or `release`
ROOT/iter_0000100/.metadata              torch_dist: sharded tensors, as Megatron-Core saves them
ROOT/iter_0000100/mp_rank_00/...         legacy: a pickle for each model-parallel rank
ROOT/args.json                           options of ms-swift's run
ROOT/iter_0000100/run_config.yaml        options of Megatron-Bridge's run
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from megaswift.base.plain_files import outside_link_rule, read_plain_file
from megaswift.errors import CheckpointError, Problem, first_line
from megaswift.folders.checkpoint import MODEL, TABLES

TRACKER = "latest_checkpointed_iteration.txt"
CONVERSION = "conversion.json"
"""What `megaswift convert hf-to-megatron` says of its folder."""
BACKEND = "metadata.json"
"""Within the folder of an iteration: which format Megatron-Core wrote."""
RELEASE = "release"
LONGEST_TRACKER = 1 << 10
LEGACY_FILE = "model_optim_rng.pt"
LEGACY_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_ITERATION = re.compile(r"iter_(\d{7,})")


@dataclass(frozen=True)
class ForeignFolder:
    """The folder of one iteration."""

    root: Path
    """Where the trainer's own files may lie: the folder above, or the folder itself."""
    tensors: Path
    legacy: bool
    """Whether it holds a pickle for each rank instead of sharded tensors."""


def find_foreign_folder(path: Path | str) -> ForeignFolder | None:
    """Find the checkpoint at `path`: the folder of one iteration, or the one above it, meaning the newest.

    Returns:
        None where there is no such checkpoint, and for checkpoints of this program.

    Raises:
        CheckpointError: The tracker file names an iteration that is not there, or the format is not read.
    """
    folder = Path(path)
    if not folder.is_dir():
        return None
    if (found := _iteration(folder, _root_of(folder))) is not None:
        return found
    tracker = folder / TRACKER
    if tracker.exists():
        name = _tracked(tracker)
        if not (folder / name).is_dir():
            rule = f"names {name}, which is not in the folder"
            raise CheckpointError(Problem(str(tracker), rule, "give the folder of one iteration, ROOT/iter_N"))
    else:
        names = [path.name for path in folder.iterdir() if _ITERATION.fullmatch(path.name) and path.is_dir()]
        if not names:
            return None
        name = max(names, key=lambda each: int(each.removeprefix("iter_")))
    if rule := outside_link_rule(folder, folder / name):
        raise CheckpointError(Problem(str(folder / name), rule))
    if (found := _iteration(folder / name, folder)) is None:
        rule = f"contains no checkpoint (neither {TABLES} nor mp_rank_00/{LEGACY_FILE})"
        raise CheckpointError(Problem(str(folder / name), rule))
    return found


def foreign_without_config_problem(folder: Path | str, option: str = "--hf_config") -> Problem:
    """Say that a checkpoint of another program needs a configuration."""
    rule = "is a checkpoint of another program, which does not have the model's config.json and tokenizer"
    return Problem(str(folder), rule, f"name the Hugging Face folder of the model that was trained: {option} DIR")


def _root_of(folder: Path) -> Path:
    return folder.parent if _ITERATION.fullmatch(folder.name) or folder.name == RELEASE else folder


def _iteration(folder: Path, root: Path) -> ForeignFolder | None:
    if any(LEGACY_RANK.fullmatch(each.name) for each in folder.glob("mp_rank_*")):
        return ForeignFolder(root, folder, True)
    backend = _backend(folder / BACKEND)
    if (folder / TABLES).is_file():
        if (folder / MODEL / "config.json").is_file() or (folder / CONVERSION).is_file():
            return None
        if backend not in ("", "torch_dist"):
            raise CheckpointError(_other_format(folder, backend))
        return ForeignFolder(root, folder, False)
    if backend == "torch_dist":
        raise CheckpointError(Problem(str(folder / TABLES), "is missing", "use a complete copy of the checkpoint"))
    if backend:
        raise CheckpointError(_other_format(folder, backend))
    return None


def _other_format(folder: Path, backend: str) -> Problem:
    rule = f"says that the checkpoint has the format {backend!r:.40}; torch_dist and the legacy format are read"
    return Problem(str(folder / BACKEND), rule, "save it again with Megatron-LM's --ckpt-format torch_dist")


def _backend(path: Path) -> str:
    """The format that Megatron-Core's own file names; empty where there is no such file."""
    if not path.exists():
        return ""
    try:
        return str(json.loads(read_plain_file(path))["sharded_backend"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(Problem(str(path), f"cannot be read ({first_line(error)})")) from None


def _tracked(tracker: Path) -> str:
    """The folder that the tracker file names."""
    try:
        text = read_plain_file(tracker, LONGEST_TRACKER).decode("ascii").strip()
    except (OSError, ValueError) as error:
        raise CheckpointError(Problem(str(tracker), f"cannot be read ({first_line(error)})")) from None
    if text == RELEASE:
        return RELEASE
    if not re.fullmatch(r"\d{1,12}", text):
        fix = "give the folder of one iteration, ROOT/iter_N"
        raise CheckpointError(Problem(str(tracker), f"has {text!r:.40}, which is no iteration", fix))
    return f"iter_{int(text):07d}"
