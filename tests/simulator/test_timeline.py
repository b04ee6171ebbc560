"""The picture of a pipeline: when stages compute, and how long they wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megaswift.simulator.calls import Pass
from megaswift.simulator.timeline import Timeline, timeline


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> Iterator[Pass]:
    """The order of a stage in Narayanan et al. 2021 (arXiv:2104.04473), figure 4."""
    ahead = min(stages - 1 - stage, microbatches)
    order = [("forward", n) for n in range(ahead)]
    for n in range(microbatches - ahead):
        order += [("forward", ahead + n), ("backward", n)]
    order += [("backward", n) for n in range(microbatches - ahead, microbatches)]
    return (Pass(kind, 0, number, 0, 0, 1) for kind, number in order)


def drawn(stages: int, microbatches: int) -> Timeline:
    """A forward pass takes 1, a backward pass 2."""
    passes = {s: list(one_forward_one_backward(s, stages, microbatches)) for s in range(stages)}
    return timeline(passes, lambda stage, p: 1.0 if p.kind == "forward" else 2.0)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 4), (4, 8), (4, 2), (8, 64)])
def test_the_bubble_is_that_of_the_formula(stages: int, microbatches: int) -> None:
    """(p - 1) / (m + p - 1) of the time."""
    shown = drawn(stages, microbatches)
    assert shown.end == 3 * (microbatches + stages - 1)
    assert shown.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert shown.busy(0) == 3 * microbatches


def test_the_picture_in_text() -> None:
    """Two stages, two micro-batches, a column for each unit of time."""
    assert drawn(2, 2).text(9) == "stage  0 01..aa.bb\nstage  1 .0aa1bb.."


def test_a_schedule_that_waits_for_ever_is_refused() -> None:
    """A backward pass before its forward pass."""
    with pytest.raises(AssertionError, match="never comes"):
        timeline({0: [Pass("backward", 0, 0, 0, 0, 1)]}, lambda stage, p: 1.0)
