"""Atomic checkpoints: written to a temporary folder, hashed, marked complete, renamed, then referenced by latest.json.

    step-N.saving/        being written; a crash leaves it without a marker, and it is ignored
    step-N/manifest.json  the marker, written last: every file with its size and SHA-256, and the trainer's state
    latest.json           the pointer; moves by rename, after all of step-N is on disk

Owns the folder OUT/checkpoints and nothing else: what is inside a step folder belongs to the engine and to
`checkpoint`. No torch, no ranks: `checkpoint` says which rank does what.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megaswift.base.atomic_writes import fsync_path, write_atomically
from megaswift.base.versions import run_folder
from megaswift.errors import CheckpointError, Problem, did_you_mean_hint
from megaswift.folders import saved_steps
from megaswift.folders.foreign import find_foreign_folder
from megaswift.folders.saved_steps import (
    MARKER,
    POINTER,
    STEP,
    SavedStep,
    load_manifest_or_none,
    manifest_seal,
)

FORMAT = 1
SAVING = ".saving"
DELETING = ".deleting"
REPLACED = ".replaced"


def write_json_durably(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON to `path`, whole or not at all; it is on disk when this returns."""
    write_atomically(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def step_files(folder: Path) -> list[Path]:
    """Return all files of a step folder but the marker, sorted."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / MARKER)


def unhashed_files(folder: Path, known: Container[str]) -> list[str]:
    """Return the files of a step folder that are not among `known`, by their paths within it."""
    names = [path.relative_to(folder).as_posix() for path in step_files(folder)]
    return [name for name in names if name not in known]


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Flush these files to disk, and return their sizes and SHA-256."""
    entries = {}
    for name in names:
        fsync_path(folder / name)
        digest = saved_steps.hash_file(folder / name)
        entries[name] = {"bytes": (folder / name).stat().st_size, "sha256": digest}
    return entries


def _delete(path: Path) -> None:
    """Deletes a folder, or a link or file in its place, never what a link leads to."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


class CheckpointStore:
    """The folder OUT/checkpoints."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, step: int) -> Path:
        """Return the folder of this step's checkpoint."""
        return self.root / f"step-{step}"

    def saving(self, step: int) -> Path:
        """Return the folder in which this step's checkpoint lies while it is written."""
        return self.root / f"step-{step}{SAVING}"

    def begin(self, step: int) -> Path:
        """Create an empty folder to write to; what a killed save of this step left is removed."""
        self.recover()
        folder = self.saving(step)
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            rule = "is a link" if folder.is_symlink() else "is a file"
            raise CheckpointError(Problem(str(folder), f"{rule}; a checkpoint is written there", "remove it"))
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        return folder

    def finish(self, step: int, files: Mapping[str, Any], state: Mapping[str, Any]) -> Path:
        """Marks, renames, moves the pointer: in this order, each on disk before the next."""
        saving = self.saving(step)
        folder = self.folder(step)
        manifest = {
            "format": FORMAT,
            "step": step,
            "saved_at": time.time(),
            **state,
            "files": dict(sorted(files.items())),
        }
        manifest = json.loads(json.dumps(manifest, allow_nan=False))
        for directory in {p.parent for p in step_files(saving)}:
            fsync_path(directory)
        write_json_durably(saving / MARKER, manifest | {"sha256": manifest_seal(manifest)})
        replaced = folder.with_name(folder.name + REPLACED)
        if folder.exists():
            folder.rename(replaced)
        saving.rename(folder)
        fsync_path(self.root)
        write_json_durably(self.root / POINTER, {"step": step, "directory": folder.name})
        if replaced.exists():
            _delete(replaced)
        return folder

    def complete(self) -> list[SavedStep]:
        """Return every checkpoint with a valid manifest, by step."""
        return saved_steps.steps_with_valid_manifest(self.root)

    def incomplete(self) -> list[Path]:
        """Return folders without a valid manifest, and those being written or deleted: a run ignores them with a
        notice."""
        whole = {s.path for s in self.complete()}
        return sorted(p for p in self.root.glob("step-*") if p.is_dir() and p not in whole)

    def pointed(self) -> Path | None:
        """Return the folder that the pointer names, if its manifest is valid."""
        return saved_steps.step_named_by_latest_json(self.root)

    def latest(self) -> Path | None:
        """Return the checkpoint that the pointer names, or the one of the highest step where the pointer is missing or
        names nothing complete."""
        return next(iter(saved_steps.steps_in_resume_order(self.root)), None)

    def recover(self) -> None:
        """Ends a replacement that a crash cut between its two renames: both folders are whole there. Rank 0 only."""
        for old in self.root.glob(f"step-*{REPLACED}"):
            folder = old.with_name(old.name.removesuffix(REPLACED))
            saving = folder.with_name(folder.name + SAVING)
            if folder.exists():
                _delete(old)
            else:
                (saving if load_manifest_or_none(saving) is not None else old).rename(folder)

    def rotate(self, limit: int | None, best: int | None = None) -> list[Path]:
        """Keeps the `limit` highest steps and always the one pointed at; clears what crashes left behind. The one of
        step `best` counts as the last but one.

        After a run went back to an earlier step, the `limit` highest up to the one pointed at stay too: they are newer
        than the steps behind it. Steps that were found to be damaged are not counted, and stay.
        """
        whole = [s for s in self.complete() if not saved_steps.has_missing_or_known_changed_files(s)]
        pointed = self.pointed()
        apart = None if best is None else self.folder(best)
        reached = next((s.step for s in whole if s.path == pointed), None)
        stay = {pointed, apart}
        for steps in (whole, [s for s in whole if reached is not None and s.step <= reached]):
            ordered = (
                [s for s in steps[:-1] if s.path != apart] + [s for s in steps[:-1] if s.path == apart] + steps[-1:]
            )
            stay |= {s.path for s in ordered[max(len(ordered) - limit, 0) :]} if limit else {s.path for s in ordered}
        gone = []
        for saved in whole:
            if saved.path not in stay:
                leaving = saved.path.with_name(saved.path.name + DELETING)
                saved.path.rename(leaving)
                gone.append(saved.path)
        for pattern in (DELETING, SAVING):
            for path in self.root.glob(f"step-*{pattern}"):
                _delete(path)
        return gone

    def remove(self, steps: Sequence[Path]) -> list[Path]:
        """Deletes steps. The pointer moves first, to the newest step that is left, or goes with the last one."""
        left = [p for p in saved_steps.steps_in_resume_order(self.root) if p not in steps]
        if self.pointed() not in left:
            if left:
                number = STEP.fullmatch(left[0].name)
                assert number is not None
                write_json_durably(self.root / POINTER, {"step": int(number[1]), "directory": left[0].name})
            else:
                (self.root / POINTER).unlink(missing_ok=True)
        for step in steps:
            leaving = step.with_name(step.name + DELETING)
            step.rename(leaving)
            fsync_path(self.root)
            _delete(leaving)
        return list(steps)


def names_newest_of_run(wanted: str | None, output: Path) -> bool:
    """Return whether `wanted` is the newest checkpoint of this run, if any: `latest`, or the run's own folder, as in a
    job that resumes itself when it is started again."""
    own = {os.path.realpath(output), os.path.realpath(output / "checkpoints")}
    return wanted is not None and (wanted == "latest" or os.path.realpath(wanted) in own)


def select_resume_step(wanted: str, output: Path) -> tuple[Path | None, list[str]]:
    """Return the checkpoint to resume from, chosen by manifests, and notices. `wanted`: `latest` (None when none was
    saved yet) or a folder."""
    steps, notes = resume_step_candidates(wanted, output)
    return next(iter(steps), None), notes


def resume_step_candidates(wanted: str, output: Path) -> tuple[list[Path], list[str]]:
    """Return the checkpoints to resume from, in the order in which they are tried, and notices. Empty where none was
    saved yet; a single one where `wanted` names it. CheckpointError where steps were saved and none is left."""
    if names_newest_of_run(wanted, output):
        store = CheckpointStore(output / "checkpoints")
        return _steps(store.root), [_notice(p) for p in store.incomplete()]
    path = Path(wanted)
    named_latest = path.name == "latest" and not path.is_dir()  # OUT/checkpoints/latest, a link in other programs
    path = path.parent if named_latest else path
    if not path.is_dir():
        newest = "use --resume_from_checkpoint latest, the newest in --output_dir" if named_latest else ""
        fix = newest or did_you_mean_hint(wanted, ["latest"]) or _others(output, path)
        raise CheckpointError(Problem(f"--resume_from_checkpoint {wanted}", "is not a folder", fix))
    path = run_folder(path, (MARKER, POINTER, "checkpoints"))
    for root in (path, path / "checkpoints"):
        if not STEP.fullmatch(root.name) and (steps := _steps(root)):
            return steps, []
    manifest = saved_steps.load_manifest_or_problem(path)
    if isinstance(manifest, Problem):
        if find_foreign_folder(path) is not None:
            rule = "is a checkpoint of another program, from which no run resumes"
            fix = f"start a run from its weights: --model {wanted} --hf_config DIR"
            raise CheckpointError(Problem(f"--resume_from_checkpoint {wanted}", rule, fix))
        rule = f"has no complete {MARKER}: not a megaswift checkpoint, or an interrupted save"
        if (path / MARKER).exists():
            rule = f"has no complete {MARKER}: it {manifest.rule}"
        raise CheckpointError(Problem(f"--resume_from_checkpoint {wanted}", rule, _others(output, path)))
    return [path], []


def _steps(root: Path) -> list[Path]:
    steps = saved_steps.steps_in_resume_order(root)
    if not steps and (lost := saved_steps.no_usable_step_problem(root)) is not None:
        raise CheckpointError(lost)
    return steps


def _notice(path: Path) -> str:
    if STEP.fullmatch(path.name):
        return f"ignoring {path}: its {MARKER} is damaged or missing"
    return f"ignoring {path}: it has no complete manifest (an interrupted save)"


def _others(output: Path, typed: Path) -> str:
    """The steps of the run that `typed` is of, else of `output`."""
    whole = CheckpointStore(typed.parent).complete() or CheckpointStore(output / "checkpoints").complete()
    return (
        "use one of " + ", ".join(str(s.path) for s in whole)
        if whole
        else "leave the option out to start from the beginning"
    )
