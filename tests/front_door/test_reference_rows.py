"""Every row of the reference documents through options, rules, engine choice and preflight, on tiny models of the same
names.

Covers: tests/front_door/reference_rows.py.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaswift import SwiftConfig
from tests.front_door.commands import Command
from tests.front_door.count import ROWS as DATA
from tests.front_door.count import refusal
from tests.front_door.reference_rows import PYTHON, ROWS, Row


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
    words = [str(place) if w == "DS.json" else w for w in shlex.split(row.words)]
    if row.yaml is not None:
        file = tmp_path / "run.yml"
        file.write_text(yaml.safe_dump(row.yaml).replace("DS.json", str(place)))
        words = ["--config", str(file), *words]
    return refusal(Command(row.label, 1, "swift", row.task, tuple(words), row.environ), root)


@pytest.mark.parametrize("row", [r for r in ROWS if not r.answer], ids=lambda r: r.label)
def test_accepted(row: Row, root: Path, tmp_path: Path) -> None:
    assert problems(row, root, tmp_path) == []


@pytest.mark.parametrize("row", [r for r in ROWS if r.answer], ids=lambda r: r.label)
def test_answered(row: Row, root: Path, tmp_path: Path) -> None:
    told = [f"{p.what} {p.rule} {p.fix}" for p in problems(row, root, tmp_path)]
    assert any(row.answer in text for text in told), told


@pytest.mark.parametrize("name", PYTHON)
def test_python(name: str) -> None:
    cfg = SwiftConfig(**PYTHON[name])
    assert cfg.parallel.tensor_parallel_size == PYTHON[name]["parallel"]["tensor_parallel_size"]


def test_rows_are_many_and_distinct() -> None:
    assert len({row.label for row in ROWS}) == len(ROWS) and len(ROWS) + len(PYTHON) >= 90
