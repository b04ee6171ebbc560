"""A rank that others wait for outside of collectives is given up after --ddp_timeout without progress, never before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaswift import distributed
from megaswift.run.faults.blocking_ranks import RankState, find_cause, patient_call
from megaswift.trainers.hooks.rank_progress import LEAST_CPU_S, ProgressWatch, work_done


class Store:
    """What ranks publish, as one of them sees it."""

    def __init__(self, rank: int, shared: dict[str, str]) -> None:
        self.rank, self.shared = rank, shared

    def publish_progress(self, value: int) -> None:
        self.shared[f"progress/{self.rank}"] = str(value)

    def progress_of(self, rank: int) -> str:
        return self.shared.get(f"progress/{rank}", "")

    def is_set(self, key: str) -> bool:
        return key in self.shared


@pytest.fixture(autouse=True)
def _no_wait() -> Iterator[None]:
    yield
    distributed.patient_waits.clear()


class Work:
    """What a process has done."""

    def __init__(self) -> None:
        self.seconds, self.bytes = 1.0, 100

    def __call__(self) -> tuple[float, int]:
        return self.seconds, self.bytes


def test_a_rank_without_progress_is_found_and_a_slow_one_is_not() -> None:
    shared: dict[str, str] = {}
    work = Work()
    other = ProgressWatch(Store(0, shared), 20.0, work)
    waits = ProgressWatch(Store(1, shared), 20.0, Work())
    with distributed.waiting_for([0]):
        for now in range(0, 300):  # it writes for five minutes
            work.bytes += 1
            distributed.patient_waits, kept = [], distributed.patient_waits
            assert other.look(now) == []
            distributed.patient_waits = kept
            assert waits.look(now) == []
        found = [now for now in range(300, 400) if waits.look(now) == [0]]  # it is stopped
    assert found and 315 <= found[0] <= 330
    assert waits.look(500.0) == []  # nobody is waited for


def test_a_rank_that_waits_for_one_with_progress_progresses() -> None:
    """Rank 2 waits for 1, which waits for 0: only the end of 0's work counts."""
    shared: dict[str, str] = {}
    work = Work()
    watches = [ProgressWatch(Store(r, shared), 10.0, work if r == 0 else Work()) for r in range(3)]
    waited = [[], [distributed.PatientWait((0,))], [distributed.PatientWait((1,))]]

    def look(now: float) -> list[list[int]]:
        found = []
        for watch, own in zip(watches, waited, strict=True):
            distributed.patient_waits[:] = own
            found.append(watch.look(now))
        return found

    for now in range(0, 200):
        work.seconds += 0.2
        assert look(now) == [[], [], []]
    stalled = next(now for now in range(200, 260) if look(now)[1] == [0])
    assert 208 <= stalled <= 216


def test_at_a_barrier_only_ranks_that_have_not_arrived_count() -> None:
    shared = {"b/arrived/0": "", "b/arrived/1": ""}
    first, late = ProgressWatch(Store(0, shared), 4.0, Work()), ProgressWatch(Store(3, shared), 4.0, Work())
    with distributed.waiting_for(range(3), "b/arrived/"):
        assert [first.look(float(now)) for now in range(8)][-1] == [2]
        assert [late.look(float(now)) for now in range(8)][-1] == []
        shared["b/arrived/2"] = ""
        assert first.look(20.0) == []


def test_a_whole_node_that_stops_is_found_by_others() -> None:
    """The first ranks are on one machine, whose disk may hang."""
    shared = {"b/arrived/3": "", "b/arrived/4": "", "b/arrived/5": ""}
    watches = {r: ProgressWatch(Store(r, shared), 4.0, Work()) for r in (3, 4, 5)}
    with distributed.waiting_for(range(6), "b/arrived/"):
        found = {r: [watch.look(float(now)) for now in range(8)][-1] for r, watch in watches.items()}
    assert found == {3: [0, 1, 2], 4: [0, 1, 2], 5: []}


def test_idle_threads_are_no_progress() -> None:
    shared: dict[str, str] = {}
    work = Work()
    watch = ProgressWatch(Store(0, shared), 20.0, work)
    watch.look(0.0)
    for now in range(10, 500, 10):
        work.seconds += 0.0005
        watch.look(float(now))
    assert shared == {"progress/0": "1"}


def test_work_is_that_of_threads_that_are_no_daemons(tmp_path: Path) -> None:
    def computes() -> None:
        sum(range(20_000_000))
        (tmp_path / "a").write_bytes(bytes(1000))

    before = work_done()
    idle = threading.Thread(target=computes, daemon=True)
    idle.start()
    idle.join()
    between = work_done()
    computes()
    after = work_done()
    assert between[1] == before[1] and between[0] - before[0] < LEAST_CPU_S
    assert after[1] >= between[1] + 1000 and after[0] - between[0] >= LEAST_CPU_S


def test_the_message_names_the_rank_that_stopped() -> None:
    assert patient_call() is None
    with distributed.waiting_for([2, 3]):
        call = patient_call([2])
        assert call is not None and call.ranks == (2,)
        own = RankState(0, call.text(), list(call.ranks))
        cause = find_cause(0, {0: own}.get, lambda rank: False, [1, 2, 3])
    assert cause.silent == [2] and "without any progress" in own.waits
