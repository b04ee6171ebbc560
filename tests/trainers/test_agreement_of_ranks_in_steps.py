"""What one rank meets in a step ends the run of all ranks, by the one reduction of a step, which is launched before the
host waits for the step before."""

from __future__ import annotations

import signal

import pytest

from megaswift.engine.protocol import GlobalBatchCounts
from tests.parity.pool import shared
from tests.trainers.agreement_ranks import AT_ONCE, LATE_SIGNAL, NOTHING, SIGNAL, STEPS, STOP, UNUSABLE, Ran

SQUARES = [3 * (36 + 49), 3 * (64 + 81), 3 * (100 + 36), 3 * (49 + 64), 3 * (81 + 100)]
"""Of batches of 6 and 7, 8 and 9, 10 and 6, ... tokens, on each of three ranks."""


def run(what: str) -> list[Ran]:
    """On three ranks."""
    found: list[Ran] = shared("").run("tests.trainers.agreement_ranks:go", what, 3)
    return found


@pytest.mark.process
@pytest.mark.parametrize("what", [UNUSABLE, SIGNAL])
def test_one_rank_ends_the_run_of_all_before_the_step(what: str) -> None:
    """Two steps are taken, and the source of every rank stands before the third batch."""
    ranks = run(what)
    assert [(ran.step, ran.source) for ran in ranks] == [(2, 2)] * 3
    errors = [ran.error for ran in ranks]
    if what == SIGNAL:
        assert [ran.interrupted for ran in ranks] == [signal.SIGTERM] * 3 and errors == [""] * 3
    else:
        assert [("row 7" in e, "another rank" in e) for e in errors] == [(False, True), (True, False), (False, True)]
    assert [ran.squares for ran in ranks] == [SQUARES[:2]] * 3
    assert [ran.saved for ran in ranks] == [[(1, 1 / 8), (2, 2 / 8), (2, 0.0)]] * 3


@pytest.mark.process
def test_a_signal_behind_the_counts_of_the_next_batch_ends_the_run_after_that_batch() -> None:
    """It comes in step 2, while the host waits for that step's numbers: the third batch is trained on, no fourth."""
    for ran in run(LATE_SIGNAL):
        assert (ran.step, ran.source, ran.interrupted) == (3, 3, signal.SIGTERM)
        assert ran.saved[-1] == (3, 0.0) and ran.asked[-1] == "counts 4", "the fourth batch was given back"


@pytest.mark.process
def test_counts_are_launched_before_the_step_before_is_read() -> None:
    """Each batch is taken in the step before, the last step takes none, and no checkpoint is ahead of its step."""
    for ran in run(NOTHING):
        taken = [(f"batch {n + 1}", f"step {n}", f"counts {n + 1}") for n in range(1, STEPS)]
        assert ran.asked == ["batch 1", "counts 1", *(word for three in taken for word in three), f"step {STEPS}"]
        assert ran.saved == [*((n, n / 8) for n in range(1, STEPS + 1)), (STEPS, 0.0)]
        assert (ran.step, ran.source, ran.squares) == (STEPS, STEPS, SQUARES)
        # rank 0 works in the background behind step 2, which the counts of the fourth batch, started in step 3, tell
        assert ran.busy == [(0, 0), (0, 0), (0, 1), (1, 2), (0, 3)]


@pytest.mark.process
def test_a_run_that_a_hook_ends_has_not_used_the_batch_that_is_taken_already() -> None:
    for ran in run(STOP):
        assert ran.step == 2 and ran.saved[-1] == (2, 0.0) and "counts 3" not in ran.asked


@pytest.mark.process
def test_a_batch_that_takes_minutes_is_taken_in_its_own_step() -> None:
    for ran in run(AT_ONCE):
        taken = [(f"batch {n}", f"counts {n}", f"step {n}") for n in range(1, STEPS + 1)]
        assert ran.asked == [word for three in taken for word in three]
        assert ran.busy == [(0, 0), (0, 1), (1, 2), (0, 3), (0, 4)]


@pytest.mark.process
def test_replicas_count_once_and_a_rank_without_a_batch_takes_part() -> None:
    """By hand: 6 + 5 and 7 + 5 tokens, 5 labels on each data-parallel rank, 4 micro-batches; ranks add to 6."""
    found = shared("").run("tests.trainers.agreement_ranks:count", None, 4)
    whole = GlobalBatchCounts({"label_weight": 10.0}, 23, 10, 4, (6.0, 1.0))
    assert found[:3] == [whole] * 3 and found[3].further == whole.further
