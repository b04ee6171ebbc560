"""When the monitor ends a process. Whole runs with a hung rank: test_hung_rank_run.py."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

import pytest

from megaswift.engine.diagnostics.flight_recorder import PendingCollective
from megaswift.run.faults import timeout_monitor
from megaswift.run.faults.diagnosis import RankDiagnosis
from megaswift.run.faults.timeout_monitor import CollectiveTimeoutMonitor, allowed_age, late_collective


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


class Asked:
    """What the store says to a rank that another one has asked."""

    rank = 1

    def __init__(self) -> None:
        self.looks: queue.Queue[None] = queue.Queue()
        self.asker_ended = threading.Event()

    def is_asked(self) -> bool:
        return True

    def asker_has_ended(self) -> bool:
        self.looks.put(None)
        return self.asker_ended.is_set()

    def publish(self, state: Any) -> None: ...

    def publish_progress(self, value: int) -> None: ...


def test_a_rank_that_was_asked_ends_after_the_one_that_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its end would stop the rank that has yet to print the message."""
    monkeypatch.setattr(timeout_monitor, "INTERVAL_S", 0.01)
    monkeypatch.setattr(timeout_monitor, "END_AFTER_S", 0.0)
    monkeypatch.setattr(timeout_monitor, "LONGER_S", 600.0)
    states: Any = Asked()
    ended: queue.Queue[object] = queue.Queue()
    with (tmp_path / "stacks").open("w") as stacks:
        monitor = CollectiveTimeoutMonitor(RankDiagnosis(tmp_path, states, stacks), end=ended.put)
        try:
            for _ in range(3):
                states.looks.get(timeout=300)
            assert ended.empty()
            states.asker_ended.set()
            assert ended.get(timeout=300) is None
        finally:
            monitor.close()
