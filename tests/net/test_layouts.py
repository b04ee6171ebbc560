"""Short runs in many layouts compute the recorded bits. No difference can be listed: whoever means to change bits
rewrites the record."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.net.layouts import CASES, MACHINE, RECORD, Inputs, machine, run
from tests.net.record import read_record


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("layouts"))


def test_every_case_is_recorded() -> None:
    assert read_record(RECORD).keys() == {MACHINE, *CASES}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("case", CASES)
def test_the_same_bits(case: str, inputs: Inputs, tmp_path: Path) -> None:
    recorded = read_record(RECORD)
    if machine() != recorded[MACHINE]:
        pytest.skip(f"recorded with {recorded[MACHINE]}; this is {machine()}")
    assert run(case, inputs, tmp_path / "out") == recorded[case]
