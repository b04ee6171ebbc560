"""Whole commands are accepted and refused as recorded, with the same options."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.net.commands import CHECKOUT, checkout, document_outcomes, example_outcomes, fuzzed_outcomes
from tests.net.front import on_any_machine
from tests.net.record import DIFFERENCES, read_differences, read_record, unlisted


def changes(record: str, now: dict[str, str]) -> list[str]:
    return unlisted(read_record(record), now, read_differences(DIFFERENCES.read_text()))


def test_command_lines_of_the_fuzzers() -> None:
    assert not changes("fuzzed.txt", fuzzed_outcomes())


@pytest.mark.slow
def test_commands_of_the_reference_documents(tmp_path: Path) -> None:
    with on_any_machine():
        assert not changes("documents.txt", document_outcomes(tmp_path))


@pytest.mark.slow
@pytest.mark.skipif(checkout() is None, reason=f"{CHECKOUT} is no checkout of ms-swift")
def test_commands_of_ms_swift_s_examples(tmp_path: Path) -> None:
    place = checkout()
    assert place is not None
    with on_any_machine():
        assert not changes("examples.txt", example_outcomes(place, tmp_path))
