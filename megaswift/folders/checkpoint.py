"""Where the parts of a checkpoint lie, from any path that a user may give. Names only: no torch, no tensor is read.

DST/.metadata, DST/model/            made by `megaswift convert hf-to-megatron`
STEP/engine/.metadata, STEP/model/   saved by a run on the native engine
STEP/engine/state/, STEP/model/      saved by a run on the torch engine
STEP/manifest.json                   written last: the step is whole
VIEW/foreign.path                    names the tensors of another program's checkpoint (`foreign_view`)
OUT/checkpoints/latest.json          names a run's latest

`find_checkpoint` looks at names and manifests. `find_intact_checkpoint` also compares the files of a step with their
SHA-256, and is what everything that reads weights goes through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaswift import log
from megaswift.base.plain_files import read_plain_file
from megaswift.base.versions import run_folder
from megaswift.errors import CheckpointError, Problem
from megaswift.folders.saved_steps import (
    POINTER,
    damage_problems_with_other_steps,
    damaged_file_problems,
    enclosing_step_folder,
    no_usable_step_problem,
    skipped_step_notice,
    steps_in_resume_order,
)

TABLES = ".metadata"
"""Which boxes of which tensors lie in which file: torch.distributed.checkpoint's name."""
MODEL = "model"
ENGINE = "engine"
WEIGHTS = (ENGINE, MODEL)
"""The folders of a step that its weights are read from."""
WHOLE = "state"
"""Within the engine's folder: safetensors of whole tensors, which the torch engine writes."""
FOREIGN = "foreign.path"
"""In a folder of ours: the path of another program's checkpoint, whose model it describes."""
FACTS = "engine.json"
"""Within the engine's folder: what wrote it."""


@dataclass(frozen=True)
class CheckpointTensorAndModelPaths:
    """The two parts."""

    tensors: Path
    """The torch_dist folder; of the torch engine the folder of `WHOLE`."""
    model: Path
    """config.json, tokenizer and what else makes it a model."""
    foreign: bool = False
    """Whether another program wrote the tensors."""

    @property
    def sharded(self) -> bool:
        """Whether it is Megatron's format, and not the torch engine's."""
        return (self.tensors / TABLES).is_file()


def find_checkpoint(path: Path | str) -> CheckpointTensorAndModelPaths | None:
    """The checkpoint at `path` by names and manifests; None where there is none.

    A converted folder, a `step-N`, an output directory or its `checkpoints` (meaning the latest), the `model` folder of
    any of these; of an output directory with versions, the newest one with checkpoints. CheckpointError for an output
    directory whose steps are all damaged.
    """
    return _find(path, lambda step, parts: [])


def find_intact_checkpoint(path: Path | str) -> CheckpointTensorAndModelPaths | None:
    """The same, with files as they were saved: of an output directory the newest step that is intact.

    CheckpointError for a damaged step that was named, and where no step is intact.
    """
    return _find(path, damaged_file_problems)


def _find(
    path: Path | str, problems_of: Callable[[Path, Sequence[str]], list[Problem]]
) -> CheckpointTensorAndModelPaths | None:
    folder = Path(path)
    parts = _parts(folder)
    if parts is not None:
        owner = parts.model.parent
        step = enclosing_step_folder(owner)
        if step is not None:
            within = owner.absolute().relative_to(step).parts[:1]
            if problems := problems_of(step, within or WEIGHTS):
                raise CheckpointError(damage_problems_with_other_steps(step, problems))
        return parts
    folder = run_folder(folder, ("checkpoints", POINTER))
    for store in (folder / "checkpoints", folder):
        problems = []
        for step in steps_in_resume_order(store):
            bad = problems_of(step, WEIGHTS)
            if not bad:
                return _parts(step)
            log.warn(skipped_step_notice(step, bad))
            problems += bad
        if problems:
            raise CheckpointError([*problems, Problem(str(store), "has no intact step", "use a copy of the run")])
        if (lost := no_usable_step_problem(store)) is not None:
            raise CheckpointError(Problem(lost.what, lost.rule, "use a copy of the run"))
    return None


def shown_model_folder(folder: Path) -> Path:
    """Return how people name a model folder: for one that stands for another program's checkpoint, that checkpoint."""
    return Path(read_plain_file(folder / FOREIGN).decode()) if (folder / FOREIGN).is_file() else folder


def _parts(folder: Path) -> CheckpointTensorAndModelPaths | None:
    if (folder / FOREIGN).is_file():
        return CheckpointTensorAndModelPaths(shown_model_folder(folder), folder, True)
    owner = folder.parent if folder.name == MODEL else folder
    for tensors in (owner, owner / ENGINE):
        if (tensors / TABLES).is_file():
            return CheckpointTensorAndModelPaths(tensors, owner / MODEL)
    if (owner / ENGINE / WHOLE).is_dir():
        return CheckpointTensorAndModelPaths(owner / ENGINE, owner / MODEL)
    return None
