"""All records at once: nothing differs from them but what is listed, and every listed difference is still there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.net import clusters, commands, options
from tests.net.front import on_any_machine
from tests.net.record import DIFFERENCES, not_seen, read_differences, read_record, unlisted


@dataclass(frozen=True)
class Compared:
    """A record and what the code does now."""

    name: str
    recorded: dict[str, str]
    now: dict[str, str]


def every_record(folder: Path) -> Iterator[Compared]:
    """Yield each record; ms-swift's examples only with a checkout."""
    yield Compared("alone.txt", read_record("alone.txt"), options.outcomes(options.alone_cases()))

    pairs = options.paired_cases()
    assert read_record("pairs.txt").keys() <= {str(case) for case in pairs}
    yield Compared("pairs.txt", options.recorded_pairs(pairs), options.outcomes(pairs))

    submitted = clusters.outcomes(clusters.cases(), empty(folder, "clusters"))
    yield Compared("submitted.txt", read_record("submitted.txt"), submitted)

    yield Compared("fuzzed.txt", read_record("fuzzed.txt"), commands.fuzzed_outcomes())

    with on_any_machine():
        documents = commands.document_outcomes(empty(folder, "documents"))
    yield Compared("documents.txt", read_record("documents.txt"), documents)

    checkout = commands.checkout()
    if checkout is not None:
        with on_any_machine():
            examples = commands.example_outcomes(checkout, empty(folder, "examples"))
        yield Compared("examples.txt", read_record("examples.txt"), examples)


def empty(folder: Path, name: str) -> Path:
    made = folder / name
    made.mkdir()
    return made


@pytest.mark.slow
def test_every_record_and_every_difference(tmp_path: Path) -> None:
    """Without a checkout of ms-swift, differences of its examples are not looked for."""
    intended = read_differences(DIFFERENCES.read_text())
    changes = [
        f"{record.name}: {line}"
        for record in every_record(tmp_path)
        for line in unlisted(record.recorded, record.now, intended)
    ]
    assert not changes
    left_out = () if commands.checkout() else read_record("examples.txt")
    assert not not_seen(intended, left_out)
