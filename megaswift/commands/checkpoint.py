"""`megaswift checkpoint ls | verify | rm`: the saved steps of a run, without loading torch.

Owns the three commands. `folders.saved_steps` decides what a step is and whether it is intact; `trainers.checkpoints`
removes steps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megaswift.base.command_words import HELP, UserErrorArgumentParser, unknown_command_error
from megaswift.base.plain_files import read_plain_file
from megaswift.base.versions import run_folder
from megaswift.errors import EXIT_USER_ERROR, CheckpointError, Problem, missing_path_hint
from megaswift.folders import saved_steps
from megaswift.folders.checkpoint import ENGINE, FACTS
from megaswift.folders.saved_steps import STEP
from megaswift.parallel.layout import Layout
from megaswift.run.lock import RunLock
from megaswift.trainers.checkpoints import CheckpointStore

HEAD = ("step", "saved", "size", "files", "SHA-256", "engine", "trains", "layout", "")
USAGE = """\
megaswift checkpoint ls OUT [--verify]        list the checkpoints of a run
megaswift checkpoint verify PATH [PATH ...]   check files against their SHA-256; exit code 2 on a mismatch
megaswift checkpoint rm STEP [STEP ...]       delete checkpoints; --force also deletes the last intact one;
                                              not possible while a run is writing to the folder
"""


def main(argv: list[str]) -> int:
    """Runs a subcommand; returns the exit code."""
    if not argv or argv[0] in HELP:
        print(USAGE, end="")
        return 0 if argv else EXIT_USER_ERROR
    if argv[0] not in COMMANDS:
        raise unknown_command_error("megaswift checkpoint", argv[0], COMMANDS)
    return COMMANDS[argv[0]](argv[1:])


def _parser(name: str, text: str) -> UserErrorArgumentParser:
    return UserErrorArgumentParser(prog=f"megaswift checkpoint {name}", description=text, allow_abbrev=False)


def _list(argv: list[str]) -> int:
    parser = _parser("ls", "Lists the checkpoints of a run by step.")
    parser.add_argument("path", metavar="OUT", type=Path, help="output directory of a run, or its checkpoints folder")
    parser.add_argument("--verify", action="store_true", help="check every file against its SHA-256 (reads all files)")
    given = parser.parse_args(argv)
    store = _store(given.path)
    rows = [_row(store, saved.path, given.verify) for saved in store.complete()]
    rows += [(p.name.removeprefix("step-"), "", "", _why_not(p), "", "", "", "", "") for p in store.incomplete()]
    if not rows:
        print(f"{store.root}: no checkpoints")
        return 0
    table = [HEAD, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(HEAD))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _why_not(path: Path) -> str:
    damaged = f"unusable: {saved_steps.MARKER} is damaged or missing"
    return damaged if STEP.fullmatch(path.name) else "incomplete"


def _row(store: CheckpointStore, step: Path, verify: bool) -> tuple[str, ...]:
    manifest = saved_steps.load_manifest_or_problem(step)
    assert isinstance(manifest, dict), "the store says that it is valid"
    files = manifest["files"]
    absent = sum(not (step / name).is_file() for name in files)
    hashes = "not compared"
    if verify:
        problems = saved_steps.damaged_file_problems(step)
        hashes = f"{len(problems)} of {len(files)} differ" if problems else "intact"
    facts = _engine_facts(step)
    engine = "weights only" if manifest.get(saved_steps.WEIGHTS_ONLY) else "unknown"
    return (
        str(manifest["step"]),
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest["saved_at"])),
        f"{sum(entry['bytes'] for entry in files.values()) / 2**20:,.1f} MiB",
        f"{absent} of {len(files)} missing" if absent else f"{len(files)} complete",
        hashes,
        str(facts.get("kind", "megatron")) if facts else engine,
        f"{manifest.get('task', '')} {facts.get('train_type', '')}".strip(),
        _layout(manifest),
        "latest" if step == store.latest() else "",
    )


def _engine_facts(step: Path) -> dict[str, Any]:
    try:
        facts = json.loads(read_plain_file(step / ENGINE / FACTS).decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _layout(manifest: dict[str, Any]) -> str:
    try:
        return Layout(**manifest["layout"]).describe()
    except (KeyError, TypeError, ValueError, CheckpointError):
        return ""


def _verify(argv: list[str]) -> int:
    parser = _parser("verify", "Checks every file of the checkpoints against the SHA-256 in their manifests.")
    parser.add_argument(
        "paths", metavar="PATH", type=Path, nargs="+", help="a step-N folder, or the output directory of a run"
    )
    given = parser.parse_args(argv)
    problems: list[Problem] = []
    for step in [step for path in given.paths for step in _steps(path)]:
        damaged = saved_steps.damaged_file_problems(step)
        problems += damaged
        print(f"{step}: {'damaged' if damaged else 'intact'}", flush=True)
    if problems:
        raise CheckpointError(problems)
    return 0


def _remove(argv: list[str]) -> int:
    parser = _parser("rm", "Deletes checkpoints and points latest.json to the newest remaining one.")
    parser.add_argument("steps", metavar="STEP", type=Path, nargs="+", help="OUT/checkpoints/step-N")
    parser.add_argument("--force", action="store_true", help="delete even if no intact checkpoint remains")
    given = parser.parse_args(argv)
    by_store: dict[Path, list[Path]] = {}
    for path in given.steps:
        step = path.absolute()
        if not step.is_dir() or not STEP.fullmatch(step.name):
            rule = "is not a checkpoint folder" if path.exists() else "does not exist"
            fix = (
                "give OUT/checkpoints/step-N; megaswift checkpoint ls OUT lists them"
                if path.exists()
                else missing_path_hint(step)
            )
            raise CheckpointError(Problem(str(path), rule, fix))
        by_store.setdefault(step.parent, []).append(step)
    if not given.force:
        problems = [
            p for root, gone in by_store.items() if (p := _leaves_none(CheckpointStore(root), gone)) is not None
        ]
        if problems:
            raise CheckpointError(problems)
    locks = [lock for root in by_store if (lock := RunLock(root.parent)).path.is_file()]
    try:
        for lock in locks:
            lock.take(fix="wait until the run ends, or stop it")
        for root, gone in by_store.items():
            for step in CheckpointStore(root).remove(gone):
                print(f"removed {step}")
    finally:
        for lock in locks:
            lock.release()
    return 0


def _leaves_none(store: CheckpointStore, gone: Sequence[Path]) -> Problem | None:
    """What speaks against removing these steps: none that is left is intact, and one of them may be."""
    left = [p for p in saved_steps.steps_in_resume_order(store.root) if p not in gone]
    if any(not saved_steps.damaged_file_problems(step) for step in left):
        return None
    if all(saved_steps.damaged_file_problems(step) for step in gone):
        return None
    names = ", ".join(step.name for step in gone)
    return Problem(
        str(store.root), f"no intact checkpoint would remain without {names}", "keep one of them, or add --force"
    )


def _store(path: Path) -> CheckpointStore:
    if not path.is_dir():
        raise CheckpointError(Problem(str(path), "is not a folder", "give the output directory of a run"))
    inner = run_folder(path, ["checkpoints"]) / "checkpoints"
    return CheckpointStore((inner if inner.is_dir() else path).absolute())


def _steps(path: Path) -> list[Path]:
    """The steps that a path means: one, or all of a run."""
    if STEP.fullmatch(path.name) or (path / saved_steps.MARKER).is_file():
        return [path]
    store = _store(path)
    steps = sorted([*(s.path for s in store.complete()), *saved_steps.steps_without_valid_manifest(store.root)])
    if not steps:
        raise CheckpointError(
            Problem(str(path), "has no checkpoints", "give a run's output directory, or OUT/checkpoints/step-N")
        )
    return steps


COMMANDS: dict[str, Callable[[list[str]], int]] = {"ls": _list, "verify": _verify, "rm": _remove}
