"""What one rank meets in a step ends the run of all ranks, by the one reduction of a step."""

from __future__ import annotations

import signal

import pytest

from megaswift.engine.protocol import GlobalBatchCounts
from tests.parity.pool import shared
from tests.trainers.agreement_ranks import SIGNAL, UNUSABLE


@pytest.mark.process
@pytest.mark.parametrize("what", [UNUSABLE, SIGNAL])
def test_one_rank_ends_the_run_of_all_before_the_step(what: str) -> None:
    """Two steps are taken, and the source of every rank stands before the third batch."""
    ranks = shared("").run("tests.trainers.agreement_ranks:go", what, 3)
    assert [(step, position) for step, _, position, _, _ in ranks] == [(2, 2)] * 3
    errors = [error for *_, error, _ in ranks]
    if what == SIGNAL:
        assert [number for _, number, *_ in ranks] == [signal.SIGTERM] * 3 and errors == [""] * 3
    else:
        assert [("row 7" in e, "another rank" in e) for e in errors] == [(False, True), (True, False), (False, True)]
    # batches of 6 and 7, then of 8 and 9 tokens, on each of three ranks
    assert [squares for *_, squares in ranks] == [[3 * (36 + 49), 3 * (64 + 81)]] * 3


@pytest.mark.process
def test_replicas_count_once_and_a_rank_without_a_batch_takes_part() -> None:
    """By hand: 6 + 5 and 7 + 5 tokens, 5 labels on each data-parallel rank, 4 micro-batches; ranks add to 6."""
    found = shared("").run("tests.trainers.agreement_ranks:count", None, 4)
    whole = GlobalBatchCounts({"label_weight": 10.0}, 23, 10, 4, (6.0, 1.0))
    assert found[:3] == [whole] * 3 and found[3].beside == whole.beside
