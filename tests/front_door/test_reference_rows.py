"""Every row of the reference documents through options, rules, engine choice and preflight, on tiny models of the same
names.

Covers: tests/front_door/reference_rows.py, tests/front_door/reference_python.py, tests/front_door/reference_entries.py.
"""

from __future__ import annotations

import json
import runpy
import shlex
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaswift import SwiftConfig
from megaswift.commands import training
from megaswift.errors import ConfigError, Problem, UserError
from megaswift.launchers.options.variables import without_local_rank
from megaswift.options.tasks import RL
from megaswift.run.checks import preflight
from megaswift.run.checks.engine_choice import resolve_engine
from tests.front_door.commands import Command
from tests.front_door.count import MACHINE, refusal, replaced_file
from tests.front_door.count import ROWS as DATA
from tests.front_door.reference_entries import ENTRIES, Entry
from tests.front_door.reference_python import PYTHON, PythonRow
from tests.front_door.reference_rows import ROWS, Row
from tests.front_door.tiny_models import tiny_model_folder
from tests.sources import ROOT


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    (folder / "rows.jsonl").write_text(DATA * 64)
    return folder


def problems(row: Row, root: Path, tmp_path: Path) -> list[Any]:
    """What is wrong with a row, with its files in `tmp_path`."""
    place = tmp_path / "DS.json"
    if row.deepspeed is not None:
        place.write_text(json.dumps(row.deepspeed))
    (tmp_path / "hosts").write_text(f"worker-0 slots=8\n{socket.gethostname()} slots=8\n")
    files = {"DS.json": str(place), "hosts": str(tmp_path / "hosts")}
    words = [files.get(w, w) for w in shlex.split(row.words)]
    if row.yaml is not None:
        file = tmp_path / "run.yml"
        file.write_text(yaml.safe_dump(row.yaml).replace("DS.json", str(place)))
        words = ["--config", str(file), *words]
    return refusal(Command(row.label, 1, "swift", row.task, tuple(words), row.environ), root)


@pytest.mark.wide
@pytest.mark.parametrize("row", [r for r in ROWS if not r.answer], ids=lambda r: r.label)
def test_accepted(row: Row, root: Path, tmp_path: Path) -> None:
    assert problems(row, root, tmp_path) == []


@pytest.mark.parametrize("row", [r for r in ROWS if r.answer], ids=lambda r: r.label)
def test_answered(row: Row, root: Path, tmp_path: Path) -> None:
    told = [f"{p.what} {p.rule} {p.fix}" for p in problems(row, root, tmp_path)]
    assert any(row.answer in text for text in told), told


def python_problems(row: PythonRow, root: Path, tmp_path: Path) -> list[Problem]:
    """What is wrong with a Python configuration, as `Trainer` checks it."""
    try:
        cfg = SwiftConfig(**row.config).replace(
            model=str(tiny_model_folder(row.model, root)),
            dataset=str(root / "rows.jsonl"),
            output_dir=str(tmp_path / "out"),
            **row.run,
        )
        cfg = resolve_engine(cfg, row.world, tell=False)
        checks = [
            (lambda: preflight.model_problems(cfg, row.world), UserError),
            (lambda: preflight.rl_run_problems(cfg, row.world) if cfg.task in RL else [], ConfigError),
            *preflight.data_output_and_tracker_checks(cfg),
        ]
        found = [p for error in preflight.collect_check_errors(checks) for p in error.problems]
    except UserError as error:
        found = [*error.problems]
    return [p for p in found if not MACHINE.search(p.rule)]


@pytest.mark.parametrize("name", PYTHON)
def test_python(name: str, root: Path, tmp_path: Path) -> None:
    row = PYTHON[name]
    told = [f"{p.what} {p.rule} {p.fix}" for p in python_problems(row, root, tmp_path)]
    assert (told == []) if not row.answer else any(row.answer in text for text in told), told


@pytest.mark.parametrize("row", ENTRIES, ids=lambda r: r.typed[:70])
def test_entry_file(row: Entry, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As python starts the file, in a worker of a launcher or before there is one: the task that it runs, and the run
    of its words."""
    started: list[tuple[str | None, list[str]]] = []
    monkeypatch.setattr(training, "main", lambda task, words=None: started.append((task, words or sys.argv[1:])) or 0)
    environ = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(row.world), "MASTER_ADDR": "::1"} if row.world else {}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(row.yaml))
    Path(replaced_file(tmp_path / "given.yaml", root)).rename(tmp_path / "run.yaml")
    file, *words = [str(tmp_path / "run.yaml") if w == "CONFIG" else w for w in shlex.split(row.typed)]
    monkeypatch.setattr(sys, "argv", [file, *words])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / file), run_name="__main__")
    ((task, passed),) = started
    assert ended.value.code == 0 and task == row.task
    words = without_local_rank(passed, environ)
    command = Command(row.typed, 1, "swift", task, tuple(words), environ)
    told = [f"{p.what} {p.rule} {p.fix}" for p in refusal(command, root)]
    assert told == []


def test_rows_are_many_and_distinct() -> None:
    assert len({row.label for row in ROWS}) == len(ROWS) and len(ROWS) + len(PYTHON) >= 140
