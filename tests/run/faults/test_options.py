"""Rules of section `parts.faults`."""

from __future__ import annotations

import pytest

from tests.config.refusals import assert_idle

IDLE = [
    ("--check_replicas_interval 3 --engine fsdp2", "--check_replicas_interval 3 --engine ddp"),
    ("--preemption_interval 3", "--preemption_interval 3 --preemption_command true"),
    ("--straggler_ratio 2", "--straggler_ratio 2 --log_straggler true"),
]


@pytest.mark.parametrize("idle, used", IDLE)
def test_an_option_that_would_be_ignored(idle: str, used: str) -> None:
    assert_idle(idle, used)
