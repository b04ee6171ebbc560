"""The outcome of whole commands: those of the reference documents, ms-swift's examples, and what the fuzzers type.

An accepted command has a hash of its options that differ from the defaults, a refused one the options that the refusal
names. `python -m tests.net.commands --write` rewrites `documents.txt`, `fuzzed.txt` and, where MS_SWIFT is a checkout
of ms-swift, `examples.txt`, which has a hash of each command in place of its words.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shlex
import sys
import tempfile
from collections.abc import Iterable
from contextlib import chdir
from pathlib import Path
from typing import Any

import yaml

from megaswift.config import SwiftConfig
from megaswift.errors import Problem
from scripts import fuzz
from tests.front_door.commands import INFERENCE, Command, commands_in_folder
from tests.front_door.count import ROWS as DATA
from tests.front_door.count import loaded, refusal
from tests.front_door.inference_commands import inference_refusal
from tests.front_door.reference_rows import ROWS, Row
from tests.net.front import ACCEPTED, on_any_machine, outcome, refused
from tests.net.record import write_record

CHECKOUT = "MS_SWIFT"
"""The variable with the path of a checkout of ms-swift."""
SEED = 46
MUTATIONS = 400
"""Of each good input of the fuzzers' command line."""


def document_outcomes(folder: Path) -> dict[str, str]:
    """Return the outcome of every command of the reference documents. `folder` is empty."""
    (folder / "rows.jsonl").write_text(DATA * 64)
    return {row.label: _outcome(_command(row, folder), folder) for row in ROWS}


def _command(row: Row, folder: Path) -> Command:
    """The command of a row, with its files in the folder."""
    file = folder / "DS.json"
    file.write_text(json.dumps(row.deepspeed))
    (folder / "hosts").write_text("worker-0 slots=8\nworker-1 slots=8\n")
    files = {"DS.json": str(file), "hosts": str(folder / "hosts")}
    words = [files.get(word, word) for word in shlex.split(row.words)]
    if row.yaml is not None:
        run = folder / "run.yml"
        run.write_text(yaml.safe_dump(row.yaml).replace("DS.json", str(file)))
        words = ["--config", str(run), *words]
    return Command(row.label, 1, "swift", row.task, tuple(words), row.environ)


def example_outcomes(checkout: Path, folder: Path) -> dict[str, str]:
    """Return the outcome of every command of ms-swift's examples by its hash. `folder` is empty."""
    (folder / "rows.jsonl").write_text(DATA * 64)
    found = {}
    with chdir(checkout):  # their scripts name files from here
        for command in commands_in_folder(checkout / "examples"):
            typed = [command.task, *command.words, *sorted(map("=".join, command.environ.items()))]
            found[_hash("\n".join(typed))] = _outcome(command, folder)
    return found


def _outcome(command: Command, folder: Path) -> str:
    if command.task in INFERENCE:
        problems = inference_refusal(command, folder)
        return _refused(problems) if problems else ACCEPTED
    problems = refusal(command, folder)
    return _refused(problems) if problems else f"{ACCEPTED} {_hash(_options(loaded(command, folder), folder))}"


def _refused(problems: Iterable[Problem]) -> str:
    return refused("\n".join(f"- {problem.what}: {problem.rule}" for problem in problems))


def _options(cfg: SwiftConfig, folder: Path) -> str:
    """The options that differ from the task's defaults."""
    defaults = _flat(SwiftConfig(task=cfg.task))
    given = {name: value for name, value in _flat(cfg).items() if value != defaults.get(name)}
    return f"{cfg.task} {json.dumps(given, sort_keys=True)}".replace(str(folder), "FOLDER")


def _flat(cfg: SwiftConfig) -> dict[str, Any]:
    sections = [section for section in cfg.to_dict().values() if isinstance(section, dict)]
    return {name: value for section in sections for name, value in section.items()}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def fuzzed_outcomes() -> dict[str, str]:
    """Return the outcome of the fuzzers' good command lines and of some that are mutated, by their hash."""
    found = {}
    for seed in fuzz.tables()[1]["command-line"]:
        for data in (seed, *(fuzz.mutated(seed, random.Random(SEED + i)) for i in range(MUTATIONS))):
            words = data.decode("utf-8", "surrogateescape").replace("\0", "").split("\n")
            found[_hash("\n".join(words))] = outcome("sft", words)
    return found


def checkout() -> Path | None:
    """Return the checkout of ms-swift where there is one."""
    given = os.environ.get(CHECKOUT)
    return Path(given).resolve() if given else None


def main() -> int:
    """Rewrite the records."""
    if sys.argv[1:] != ["--write"]:
        print(__doc__)
        return 2
    place = checkout()
    write_record("fuzzed.txt", fuzzed_outcomes())
    with tempfile.TemporaryDirectory() as folder, on_any_machine():
        write_record("documents.txt", document_outcomes(Path(folder)))
    if place is not None:
        with tempfile.TemporaryDirectory() as folder, on_any_machine():
            write_record("examples.txt", example_outcomes(place, Path(folder)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
