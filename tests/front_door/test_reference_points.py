"""How many points of the reference documents are accepted, and that each of the others has an answer.

The rows themselves are typed by the tests of the rows.

Covers: tests/front_door/reference_points.py.
"""

from __future__ import annotations

import re

import pytest

from tests.front_door.reference_entries import ENTRIES
from tests.front_door.reference_points import POINTS, Point
from tests.front_door.reference_python import PYTHON
from tests.front_door.reference_rows import ROWS
from tests.front_door.test_inference_commands import ACCEPTED, REFUSED
from tests.sources import ROOT

OTHER_PROGRAMS = {22, 30, 37, 49, 55, 60, 72, 83, 107, 108, 122, 130}
"""Points of the documents about kubectl, nvidia-smi, variables of NCCL, scripts of torch."""
OUTCOMES = {
    **{row.label: not row.answer for row in ROWS},
    **{f"python: {name}": not row.answer for name, row in PYTHON.items()},
    **{f"inference: {name}": True for name in ACCEPTED},
    **{f"inference: {name}": False for name in REFUSED},
}
"""Every row -> whether it is accepted; the tests of the rows hold them to it."""


def accepted_row(name: str) -> bool:
    """Whether a row passes preflight, or a test that shows it exists; an assertion where there is no such row."""
    if name.startswith("tests/"):
        file, _, test = name.partition("::")
        assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.MULTILINE), name
        return True
    if name.startswith("entry: "):
        assert any(row.typed.startswith(name.removeprefix("entry: ")) for row in ENTRIES), name
        return True
    assert name in OUTCOMES, name
    return OUTCOMES[name]


def is_accepted(point: Point) -> bool:
    """Every item of the point is."""
    return bool(point.shown) and not point.answered and not point.later and all(map(accepted_row, point.shown))


def test_every_point_is_there_once() -> None:
    assert sorted(p.number for p in POINTS) == sorted({*range(1, 135)} - OTHER_PROGRAMS)


def test_most_are_accepted_as_they_are() -> None:
    """All items, through preflight; those that only a part of is accepted do not count."""
    accepted = [p for p in POINTS if is_accepted(p)]
    print(f"{len(accepted)} of {len(POINTS)}; the others: {[p.number for p in POINTS if p not in accepted]}")
    assert len(accepted) == 95


@pytest.mark.parametrize("point", POINTS, ids=lambda p: f"{p.number} {p.subject}")
def test_every_point_is_answered(point: Point) -> None:
    assert point.shown or point.answered or point.page or point.later
    assert all(map(accepted_row, point.shown))
    assert not any(map(accepted_row, point.answered))
    if point.page:
        page, _, text = point.page.partition(": ")
        assert text in (ROOT / "docs" / page).read_text()
