"""The manifest of a saved step: which files the step has, and whether they are still what was saved. No torch.

Owns reading manifest.json with a check of every type in it (a JSON file can hold anything), the order in which the
steps of a run are tried, and the comparison of files with their SHA-256. Each file is read once per process.
`trainers.checkpoints` writes steps; `trainers.file_hashes` splits the reading over ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from megaswift import log
from megaswift.base.plain_files import read_plain_file
from megaswift.errors import CheckpointError, Problem

MARKER = "manifest.json"
POINTER = "latest.json"
WEIGHTS_ONLY = "weights_only"
"""Key of a manifest: the step has neither optimizer nor random states, so that no run resumes from it."""
STEP = re.compile(r"step-([0-9]+)")
LONG = 5.0
"""Seconds of hashing that are worth a line."""
_HASH = re.compile(r"[0-9a-f]{64}")
_KNOWN: dict[tuple[str, int, int, str], bool] = {}
"""(path, bytes, time of change, expected SHA-256) -> whether the file has it."""


@dataclass(frozen=True)
class SavedStep:
    """A step with a valid manifest."""

    step: int
    path: Path
    saved_at: float
    """Unix time."""
    files: Mapping[str, Mapping[str, Any]]
    """By path within the step: `bytes` and `sha256`."""


def manifest_seal(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of the manifest without its own seal."""
    plain = {k: v for k, v in manifest.items() if k != "sha256"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def load_manifest_or_problem(folder: Path) -> dict[str, Any] | Problem:
    """The manifest of a step, or what is wrong with it."""
    path = folder / MARKER
    try:
        manifest = json.loads(read_plain_file(path).decode("utf-8"))
    except FileNotFoundError:
        return Problem(str(path), "is missing: not a checkpoint of megaswift, or an interrupted save")
    except (OSError, ValueError, RecursionError) as error:
        return Problem(str(path), f"cannot be read ({type(error).__name__})")
    if not isinstance(manifest, dict):
        return Problem(str(path), "is not a JSON object")
    try:
        intact = manifest.get("sha256") == manifest_seal(manifest)
    except (ValueError, RecursionError):
        intact = False
    if not intact:
        return Problem(str(path), "does not match its recorded SHA-256")
    if wrong := _wrong_types(manifest):
        return Problem(str(path), f"has a wrong value for {wrong}")
    named = STEP.fullmatch(folder.name)
    if named and int(named[1]) != manifest["step"]:
        return Problem(str(path), f"is the manifest of step {manifest['step']}")
    return manifest


def load_manifest_or_none(folder: Path) -> dict[str, Any] | None:
    """The manifest of a step, None where it is missing or damaged."""
    manifest = load_manifest_or_problem(folder)
    return None if isinstance(manifest, Problem) else manifest


def _wrong_types(manifest: Mapping[str, Any]) -> str:
    """The first entry whose type is not what a step's manifest has there; empty if all are."""
    counts = {name: manifest.get(name, 0) for name in ("total_steps", "global_batch_size", "skipped_steps")}
    counts |= {name: manifest.get(name) for name in ("format", "step")}
    parts = {name: manifest.get(name, {}) for name in ("data", "hooks", "config", "model", "layout")}
    saved_at = manifest.get("saved_at")
    files = manifest.get("files")
    a_time = isinstance(saved_at, int | float) and not isinstance(saved_at, bool) and abs(saved_at) < 2**53
    wrong = [name for name, value in counts.items() if not _count(value)]
    wrong += [name for name, value in parts.items() if not isinstance(value, dict)]
    wrong += [] if a_time else ["saved_at"]
    if not isinstance(files, dict):
        return [*wrong, "files"][0]
    wrong += [f"files, {name[:80]!r}" for name, entry in files.items() if not _is_entry(name, entry)]
    return wrong[0] if wrong else ""


def _is_entry(name: str, entry: object) -> bool:
    """Whether it is a file within the step, with its size and SHA-256."""
    inside = PurePosixPath(name)
    if not name or inside.is_absolute() or ".." in inside.parts or "\0" in name or not isinstance(entry, dict):
        return False
    digest = entry.get("sha256")
    return _count(entry.get("bytes")) and isinstance(digest, str) and _HASH.fullmatch(digest) is not None


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def steps_with_valid_manifest(store: Path) -> list[SavedStep]:
    """Every step of OUT/checkpoints with a valid manifest, by number: a clock that was set back does not change the
    order. No other file is read."""
    steps = []
    for path in store.glob("step-*"):
        match = STEP.fullmatch(path.name)
        if match and (manifest := load_manifest_or_none(path)) is not None:
            steps.append(SavedStep(int(match[1]), path, float(manifest["saved_at"]), manifest["files"]))
    return sorted(steps, key=lambda s: (s.step, s.saved_at))


def steps_without_valid_manifest(store: Path) -> list[Path]:
    """Folders `step-N` without a valid manifest. A step gets its name after its manifest is on disk, so each of these
    was whole once."""
    return sorted(
        p for p in store.glob("step-*") if STEP.fullmatch(p.name) and p.is_dir() and load_manifest_or_none(p) is None
    )


def step_named_by_latest_json(store: Path) -> Path | None:
    """The step that latest.json names, if its manifest is valid."""
    step = _named_by_pointer(store)
    return step if step is not None and load_manifest_or_none(step) is not None else None


def _named_by_pointer(store: Path) -> Path | None:
    try:
        name = json.loads(read_plain_file(store / POINTER).decode("utf-8"))["directory"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return store / name if isinstance(name, str) and STEP.fullmatch(name) else None


def steps_in_resume_order(store: Path) -> list[Path]:
    """The steps in the order in which they are tried: the one pointed at, those before it, the newest first, then those
    behind it, which a run that went back to an earlier step has left."""
    saved = steps_with_valid_manifest(store)[::-1]
    pointed = next((s.step for s in saved if s.path == _named_by_pointer(store)), None)
    if pointed is None:
        return [s.path for s in saved]
    return [s.path for s in saved if s.step <= pointed] + [s.path for s in saved if s.step > pointed]


def no_usable_step_problem(store: Path) -> Problem | None:
    """What is wrong with an OUT/checkpoints that had steps and has no usable one; None where none was ever saved."""
    points = (store / POINTER).exists()
    if not (points or store.name == "checkpoints") or steps_with_valid_manifest(store):
        return None
    fix = (
        "restore a copy of a checkpoint; to start from step 0, use --overwrite_output_dir true instead of "
        "--resume_from_checkpoint, which moves this run aside"
    )
    if damaged := steps_without_valid_manifest(store):
        names = ", ".join(p.name for p in damaged)
        return Problem(str(store), f"has no usable checkpoint: {MARKER} is damaged or missing in {names}", fix)
    return Problem(str(store), f"has no checkpoint, but {POINTER} names one that was saved", fix) if points else None


def enclosing_step_folder(path: Path) -> Path | None:
    """The step that `path` is, or lies in; also one without its manifest."""
    path = path.absolute()
    for folder in (path, *path.parents)[:3]:
        if folder.is_dir() and (STEP.fullmatch(folder.name) or _is_moved_step(folder)):
            return folder
    return None


def _is_moved_step(folder: Path) -> bool:
    """Whether a folder of another name has the parts of a step."""
    return (folder / MARKER).is_file() and any((folder / part).is_dir() for part in ("engine", "hf", "adapter"))


def manifest_file_entries(manifest: Mapping[str, Any], parts: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """The files of these folders of a step, or of all of it."""
    chosen = tuple(f"{part}/" for part in parts)
    return {name: entry for name, entry in manifest["files"].items() if not chosen or name.startswith(chosen)}


def hash_file(path: Path) -> str:
    """SHA-256 of its content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached_file_integrity_verdict(path: Path, expected: Mapping[str, Any]) -> bool | None:
    """Whether the file is what was saved, if that was found out already and it has not changed since."""
    try:
        facts = path.stat()
    except (OSError, ValueError):
        return None
    return _KNOWN.get((str(path), facts.st_size, facts.st_mtime_ns, expected["sha256"]))


def remember_intact(path: Path, expected: Mapping[str, Any], intact: bool) -> None:
    """For `cached_file_integrity_verdict`: what this process or another rank found."""
    try:
        facts = path.stat()
    except OSError:
        return
    _KNOWN[(str(path), facts.st_size, facts.st_mtime_ns, expected["sha256"])] = intact


def has_missing_or_known_changed_files(saved: SavedStep) -> bool:
    """Whether a file of the step is missing, or this process knows that it has changed. Reads none."""
    return any(
        cached_file_integrity_verdict(saved.path / name, entry) is False or not os.path.isfile(saved.path / name)
        for name, entry in saved.files.items()
    )


def file_problem(path: Path, expected: Mapping[str, Any]) -> Problem | None:
    """How a file differs from what was saved. Reads it unless the answer is known."""
    try:
        facts = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return Problem(str(path), "is missing")
    except (OSError, ValueError) as error:
        return Problem(str(path), f"cannot be read ({getattr(error, 'strerror', None) or error})")
    if not stat.S_ISREG(facts.st_mode):
        return Problem(str(path), "is not a file")
    size = facts.st_size
    if size != expected["bytes"]:
        return Problem(str(path), f"has {size} bytes; the manifest has {expected['bytes']}")
    intact = cached_file_integrity_verdict(path, expected)
    if intact is None:
        try:
            intact = hash_file(path) == expected["sha256"]
        except OSError as error:
            return Problem(str(path), f"cannot be read ({error.strerror or error})")
        remember_intact(path, expected, intact)
    return None if intact else Problem(str(path), "its content changed since it was saved (SHA-256 differs)")


def damaged_file_problems(step: Path, parts: Iterable[str] = ()) -> list[Problem]:
    """What of a step (or of these folders of it) is not as it was saved; by one process alone."""
    manifest = load_manifest_or_problem(step)
    if isinstance(manifest, Problem):
        return [manifest]
    files = manifest_file_entries(manifest, parts)
    began = time.perf_counter()
    problems = [p for name, entry in files.items() if (p := file_problem(step / name, entry)) is not None]
    log_check_duration(step, files.values(), time.perf_counter() - began)
    return problems


def log_check_duration(step: Path, files: Iterable[Mapping[str, Any]], seconds: float) -> None:
    """A line about a check that took long."""
    if seconds > LONG:
        size = sum(entry["bytes"] for entry in files)
        log.info(f"checked the SHA-256 of {step} ({size / 2**30:,.1f} GiB) in {seconds:.0f} s")


def refuse_damaged_part(folder: Path) -> None:
    """CheckpointError where a folder, such as `adapter`, lies in a step and is not as it was saved."""
    step = enclosing_step_folder(folder)
    if step is None or not (within := folder.absolute().relative_to(step).parts[:1]):
        return
    if problems := damaged_file_problems(step, within):
        raise CheckpointError(damage_problems_with_other_steps(step, problems))


def damage_problems_with_other_steps(step: Path, problems: list[Problem]) -> list[Problem]:
    """The damage of a step that the user named, with the other steps of its run as the fix."""
    other_steps = [p.name for p in steps_in_resume_order(step.parent) if p != step]
    fix = f"use another step of this run: {', '.join(other_steps[:4])}" if other_steps else "use a copy of this step"
    return [*problems[:-1], Problem(problems[-1].what, problems[-1].rule, fix)]


def skipped_step_notice(step: Path, problems: list[Problem]) -> str:
    """The line about a damaged step in whose place an older one is used."""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{step} is damaged and is not used: {problems[0].what} {problems[0].rule}{more}"
