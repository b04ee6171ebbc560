"""Options are accepted and refused as recorded: the record is the safety net of the restructuring of options."""

from __future__ import annotations

import pytest

from tests.net.options import alone_cases, listed_options, outcomes, paired_cases, recorded_pairs, sampled_pairs
from tests.net.record import DIFFERENCES, Difference, not_seen, read_differences, read_record, unlisted

PAIRS = 1500
"""Of the default tier."""
LISTED = 300
"""Cases of intended differences that the default tier looks at."""
SURFACE = DIFFERENCES.parents[1] / "config" / "surface.txt"


def test_every_option_is_listed() -> None:
    """Options of training: the frozen surface has the name of each behind its section."""
    listed = {option.name for option in listed_options() if option.command not in ("infer", "deploy", "export")}
    assert listed == {line.split()[1] for line in SURFACE.read_text().splitlines()}


@pytest.mark.wide
def test_every_option_alone() -> None:
    intended = read_differences(DIFFERENCES.read_text())
    assert not unlisted(read_record("alone.txt"), outcomes(alone_cases()), intended)


@pytest.mark.wide
def test_some_pairs() -> None:
    """A fixed sample with every option and every value of a selector, and the pairs that are listed as different."""
    intended = read_differences(DIFFERENCES.read_text())
    listed = [case for case in paired_cases() if any(d.is_about(str(case)) for d in intended)]
    cases = list(dict.fromkeys([*sampled_pairs(PAIRS), *listed[:LISTED]]))
    assert not unlisted(recorded_pairs(cases), outcomes(cases), intended)


def test_a_difference_is_listed_or_reported() -> None:
    recorded = {"sft --a 1": "refused a", "sft --b 1": "accepted", "sft --c 1": "accepted"}
    now = {"sft --a 1": "refused a / engine", "sft --b 1": "refused b", "sft --d 1": "accepted"}
    intended = read_differences("# comment\nsft --a * | = / engine | names the engine\nsft --e * | accepted | gone\n")
    assert unlisted(recorded, now, intended) == [
        "sft --b 1: accepted -> refused b",
        "sft --c 1: accepted -> no such case",
        "sft --d 1: no such case -> accepted",
    ]
    assert [d.seen for d in intended] == [1, 0]
    assert not_seen(intended, ["sft --f 1"]) == ["sft --e * | accepted: no such difference"]
    assert not not_seen(intended, ["sft --e 1"])
    assert intended[0] == Difference("sft --a *", "= / engine", "names the engine")
