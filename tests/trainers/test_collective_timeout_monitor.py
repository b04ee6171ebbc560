"""When the monitor ends a process. Whole runs with a hung rank: test_hung_rank_run.py."""

from __future__ import annotations

import pytest

from megaswift.engine.flight_recorder_hang_diagnosis import PendingCollective
from megaswift.trainers.collective_timeout_monitor import allowed_age, late_collective


def pending(backend: str, age: float, timeout: float = 600.0) -> PendingCollective:
    return PendingCollective("all_reduce", "0", "default_pg", 3, age, timeout, backend)


@pytest.mark.parametrize(
    ("backend", "timeout", "seconds"), [("nccl", 600.0, 595.0), ("nccl", 6.0, 3.0), ("gloo", 600.0, 603.0)]
)
def test_before_nccl_and_after_the_others(backend: str, timeout: float, seconds: float) -> None:
    assert allowed_age(pending(backend, 0.0, timeout)) == seconds


def test_each_operation_has_the_time_of_its_own_group() -> None:
    patient, late = pending("gloo", 700.0, 7200.0), pending("nccl", 596.0)
    assert late_collective([patient, pending("gloo", 1.0), late]) is late
    assert late_collective([patient, pending("nccl", 594.0)]) is None
