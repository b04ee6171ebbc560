"""Rules of section `fault_tolerance`."""

from __future__ import annotations

import pytest

from megaswift.config.fault_tolerance_rules import FAULT_TOLERANCE_IGNORED
from megaswift.config.sections import NAMES
from tests.config.refusals import assert_idle

IDLE = [
    ("--check_replicas_interval 3 --engine fsdp2", "--check_replicas_interval 3 --engine ddp"),
    ("--preemption_interval 3", "--preemption_interval 3 --preemption_command true"),
    ("--straggler_ratio 2", "--straggler_ratio 2 --log_straggler true"),
]


@pytest.mark.parametrize("idle, used", IDLE)
def test_an_option_that_would_be_ignored(idle: str, used: str) -> None:
    assert_idle(idle, used)


def test_every_row_is_tried() -> None:
    assert {NAMES[i.split()[0][2:]] for i, _ in IDLE} == {r.option for r in FAULT_TOLERANCE_IGNORED}
