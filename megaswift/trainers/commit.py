"""How a checkpoint becomes one: written beside, hashed, marked, renamed, and only then pointed at.

    step-N.saving/        being written; a crash leaves it without a marker, and it is ignored
    step-N/manifest.json  the marker, written last: every file with its size and SHA-256, and the trainer's state
    latest.json           the pointer; moves by rename, after all of step-N is on disk

Owns the folder OUT/checkpoints and nothing else: what is inside a step folder belongs to the engine and to
`checkpoint`. No torch, no ranks: `checkpoint` says which rank does what.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaswift.disk import sync
from megaswift.errors import CheckpointError, Problem, nearest
from megaswift.families.checkpoint_folder import MARKER, POINTER, STEP

FORMAT = 1
SAVING, DELETING, REPLACED = ".saving", ".deleting", ".replaced"


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    step: int
    path: Path
    saved_at: float
    """Unix time."""


def write_durably(path: Path, value: Mapping[str, Any]) -> None:
    """JSON at `path`, whole or not at all, on disk when this returns."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    sync(fresh)
    fresh.replace(path)
    sync(path.parent)


def payload(folder: Path) -> list[Path]:
    """All files of a step folder but the marker, sorted."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / MARKER)


def hash_share(folder: Path, rank: int, ranks: int) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every `ranks`-th file, flushed to disk: the ranks share the reading."""
    found = {}
    for path in payload(folder)[rank::ranks]:
        sync(path)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        found[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": digest}
    return found


def seal(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of the manifest without its own seal."""
    plain = {k: v for k, v in manifest.items() if k != "sha256"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The marker of a complete checkpoint, None where there is none or it was not written by us whole."""
    try:
        manifest = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("sha256") == seal(manifest) else None


def verify_share(folder: Path, manifest: Mapping[str, Any], rank: int, ranks: int) -> list[Problem]:
    """What does not agree with the manifest in every `ranks`-th file."""
    problems = []
    for name, expected in list(manifest["files"].items())[rank::ranks]:
        path = folder / name
        if not path.is_file():
            problems.append(Problem(str(path), "is missing"))
        elif path.stat().st_size != expected["bytes"]:
            problems.append(
                Problem(str(path), f"has {path.stat().st_size} bytes, the manifest says {expected['bytes']}")
            )
        else:
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                    problems.append(Problem(str(path), "its content changed since it was saved (SHA-256 differs)"))
    return problems


class Store:
    """The folder OUT/checkpoints."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, step: int) -> Path:
        """Where the checkpoint of this step lies."""
        return self.root / f"step-{step}"

    def saving(self, step: int) -> Path:
        """Where it is written."""
        return self.root / f"step-{step}{SAVING}"

    def begin(self, step: int) -> Path:
        """An empty folder to write to; what a killed save of this step left is removed."""
        self.recover()
        folder = self.saving(step)
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        return folder

    def finish(self, step: int, files: Mapping[str, Any], state: Mapping[str, Any]) -> Path:
        """Marks, renames, moves the pointer: in this order, each on disk before the next."""
        saving, folder = self.saving(step), self.folder(step)
        manifest = {
            "format": FORMAT,
            "step": step,
            "saved_at": time.time(),
            **state,
            "files": dict(sorted(files.items())),
        }
        manifest = json.loads(json.dumps(manifest, allow_nan=False))
        for directory in {p.parent for p in payload(saving)}:
            sync(directory)
        write_durably(saving / MARKER, manifest | {"sha256": seal(manifest)})
        replaced = folder.with_name(folder.name + REPLACED)
        if folder.exists():
            folder.rename(replaced)
        saving.rename(folder)
        sync(self.root)
        write_durably(self.root / POINTER, {"step": step, "directory": folder.name})
        if replaced.exists():
            shutil.rmtree(replaced)
        return folder

    def complete(self) -> list[Saved]:
        """Every checkpoint with a marker, oldest save first."""
        found = []
        for path in self.root.glob("step-*"):
            match, manifest = STEP.fullmatch(path.name), read_manifest(path)
            if match and manifest is not None:
                found.append(Saved(int(match[1]), path, float(manifest["saved_at"])))
        return sorted(found, key=lambda s: (s.saved_at, s.step))

    def incomplete(self) -> list[Path]:
        """Folders without a marker, and what was on its way in or out: ignored, and worth a notice."""
        whole = {s.path for s in self.complete()}
        return sorted(p for p in self.root.glob("step-*") if p.is_dir() and p not in whole)

    def pointed(self) -> Path | None:
        """The folder that the pointer names, if it is complete."""
        try:
            name = str(json.loads((self.root / POINTER).read_text(encoding="utf-8"))["directory"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        path = self.root / name
        return path if STEP.fullmatch(name) and read_manifest(path) is not None else None

    def latest(self) -> Path | None:
        """The pointed-at checkpoint; the one saved last where the pointer is missing or names nothing complete."""
        whole = self.complete()
        return self.pointed() or (whole[-1].path if whole else None)

    def recover(self) -> None:
        """Ends a replacement that a crash cut between its two renames: both folders are whole there. Rank 0 only."""
        for old in self.root.glob(f"step-*{REPLACED}"):
            folder = old.with_name(old.name.removesuffix(REPLACED))
            saving = folder.with_name(folder.name + SAVING)
            if folder.exists():
                shutil.rmtree(old)
            else:
                (saving if read_manifest(saving) is not None else old).rename(folder)

    def rotate(self, limit: int | None) -> list[Path]:
        """Keeps the `limit` checkpoints saved last, and always the one pointed at; clears what crashes left behind."""
        whole, pointed = self.complete(), self.pointed()
        surplus = whole[: max(len(whole) - limit, 0)] if limit else []
        gone = []
        for saved in surplus:
            if saved.path != pointed:
                leaving = saved.path.with_name(saved.path.name + DELETING)
                saved.path.rename(leaving)
                gone.append(saved.path)
        for pattern in (DELETING, SAVING):
            for path in self.root.glob(f"step-*{pattern}"):
                shutil.rmtree(path)
        return gone


def select(wanted: str, output: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from, and what to tell: `latest` (None when there is none yet) or a folder."""
    if wanted == "latest":
        store = Store(output / "checkpoints")
        found = store.latest()
        notes = [f"ignoring {p}: it has no complete manifest (an interrupted save)" for p in store.incomplete()]
        return found, notes
    path = Path(wanted)
    named_latest = path.name == "latest" and not path.is_dir()  # OUT/checkpoints/latest, a link in other programs
    path = path.parent if named_latest else path
    if not path.is_dir():
        newest = "--resume_from_checkpoint latest, the newest of --output_dir" if named_latest else ""
        fix = newest or nearest(wanted, ["latest"]) or _others(output)
        raise CheckpointError(Problem(f"--resume_from_checkpoint {wanted}", "is not a folder", fix))
    for root in (path, path / "checkpoints"):
        if not STEP.fullmatch(root.name) and (inner := Store(root).latest()) is not None:
            return inner, []
    if read_manifest(path) is None:
        rule = f"has no complete {MARKER}: not a checkpoint of ours, or an interrupted save"
        raise CheckpointError(Problem(f"--resume_from_checkpoint {wanted}", rule, _others(output)))
    return path, []


def _others(output: Path) -> str:
    whole = Store(output / "checkpoints").complete()
    return (
        "one of " + ", ".join(str(s.path) for s in whole)
        if whole
        else "leave the option out to start from the beginning"
    )
