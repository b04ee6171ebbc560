"""Skipped steps: who had them, when a run has learned nothing; spikes of the loss.

Covers: megaswift/losses/sft.py.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from megaswift.engine.protocol import MicrobatchLossAndSamples, StepResult
from megaswift.errors import ConfigError, Problem, UserError
from megaswift.run import course
from megaswift.trainers.hook import StepRecord
from megaswift.trainers.hooks.step_monitor import (
    SkippedStepAndLossSpikeMonitor,
    TrainingDiverged,
    is_spike,
    worst_microbatches,
    worst_microbatches_text,
)
from megaswift.trainers.loop import train
from tests.trainers.test_loop import Stumbling
from tests.trainers.tiny import tiny_loop


def run(steps: int, bad: set[int]) -> SkippedStepAndLossSpikeMonitor:
    watch = SkippedStepAndLossSpikeMonitor()
    loop = tiny_loop(steps, watch)
    loop.engine = Stumbling(bad)
    train(loop)
    return watch


@pytest.mark.parametrize(
    "steps, bad", [(12, set(range(4, 13))), (9, set(range(1, 10))), (2, {1, 2}), (1, {1}), (5, {3, 4, 5})]
)
def test_a_run_whose_last_steps_were_skipped_has_failed(steps: int, bad: set[int]) -> None:
    with pytest.raises(TrainingDiverged, match=f"{len(bad)} of {steps} steps? were skipped") as error:
        run(steps, bad)
    assert error.value.exit_code == 3


@pytest.mark.parametrize("steps, bad", [(12, {1, 2, 3, 4}), (12, {11, 12}), (12, {5}), (3, set())])
def test_a_run_that_recovered_ends_with_a_warning(
    steps: int, bad: set[int], capsys: pytest.CaptureFixture[str]
) -> None:
    watch = run(steps, bad)
    assert (f"{len(bad)} of {steps} steps were skipped" in capsys.readouterr().err) == bool(bad)
    assert (f"{len(bad)} step" in watch.summary()) == bool(bad)


def test_the_count_goes_on_after_a_resume() -> None:
    """A checkpoint between skipped steps hides none of them: at the last step already, the run has failed too."""
    watch, resumed = SkippedStepAndLossSpikeMonitor(), SkippedStepAndLossSpikeMonitor()
    watch.in_a_row, watch.at_the_end, watch.skipped = 4, 4, 5
    resumed.load_state_dict(watch.state_dict())
    loop = tiny_loop(12, resumed)
    loop.step = 12
    with pytest.raises(TrainingDiverged, match="5 of 12 steps were skipped, among them the last 4 steps"):
        resumed.check_progress(loop)
    resumed.load_state_dict({"in_a_row": 3})  # as older checkpoints have it
    assert resumed.skipped == 3


@pytest.mark.parametrize("steps, first, failed", [(9, 1, True), (12, 9, True), (12, 11, False), (1, 1, True)])
def test_steps_skipped_while_the_loss_scale_falls_are_no_success(
    steps: int, first: int, failed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """float16: every gradient from step `first` on is NaN, and the run ends before the scale is at its minimum."""
    watch, loop = SkippedStepAndLossSpikeMonitor(), tiny_loop(steps)
    for number in range(1, steps + 1):
        bad = number >= first
        result = StepResult(math.nan if bad else 1.0, skipped=bad, loss_scale_falling=bad)
        watch.on_step(loop, StepRecord(number, 0.0, 0.1, result, 1.0, 0.0, 0))
    resumed = SkippedStepAndLossSpikeMonitor()
    resumed.load_state_dict(watch.state_dict())
    loop.step, count = steps, steps + 1 - first
    for one in (watch, resumed):
        if failed:
            with pytest.raises(TrainingDiverged, match=f"{count} of {steps} steps? were skipped") as error:
                one.check_progress(loop)
            assert error.value.exit_code == 3
        else:
            one.check_progress(loop)
            assert f"{count} of {steps} steps were skipped" in capsys.readouterr().err


def test_the_rows_of_a_loss_that_is_not_finite_are_named() -> None:
    parts = [
        MicrobatchLossAndSamples(0.3, (0, 1)),
        MicrobatchLossAndSamples(math.nan, (6, 11)),
        MicrobatchLossAndSamples(0.9, (2, 3)),
    ]
    assert worst_microbatches_text(parts) == "; rank 0, rows 7, 12"
    assert worst_microbatches_text([parts[0], parts[2]]) == "; rank 0, rows 3, 4", "else those of the largest loss"
    assert (
        worst_microbatches_text([MicrobatchLossAndSamples(math.inf, tuple(range(20)))])
        == "; rank 0, rows 1, 2, 3, 4, 5, 6, 7, 8 and 12 more"
    )
    assert worst_microbatches_text([]) == worst_microbatches_text([MicrobatchLossAndSamples(math.nan, ())]) == ""
    assert worst_microbatches([(0, parts[1]), (1, parts[1]), (2, parts[2])]) == [(0, parts[1])], (
        "tensor-parallel ranks share rows"
    )


def step(number: int, loss: float, skipped: bool = False) -> StepRecord:
    result = StepResult(loss, skipped=skipped, parts=(MicrobatchLossAndSamples(loss, (number,)),))
    return StepRecord(number, 0.0, 0.1, result, 1.0, 0.0, 0)


def test_a_spike_is_told_with_its_step_and_rows(capsys: pytest.CaptureFixture[str]) -> None:
    watch, loop = SkippedStepAndLossSpikeMonitor(), tiny_loop(20)
    for number in range(1, 13):
        watch.on_step(loop, step(number, 6.85 + 0.01 * (number % 3)))
    assert capsys.readouterr().err == ""
    watch.on_step(loop, step(13, 2.3e7))
    err = capsys.readouterr().err
    assert "step 13: loss 2.3e+07 is far above the median 6.86 of the 12 steps before" in err and "row 14" in err
    watch.on_step(loop, step(14, 6.85))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "before, loss, spike",
    [
        ([2.0] * 9, 99.0, False),  # too few to compare with
        ([2.0] * 10, 2.9, False),
        ([2.0] * 10, 3.1, True),
        ([8.0] * 10, 11.9, False),  # half of the median
        ([8.0] * 10, 12.1, True),
        ([1.0, 3.0] * 10, 11.9, False),  # ten deviations of 1
        ([1.0, 3.0] * 10, 12.1, True),
        ([2.0] * 49 + [1e9], 3.1, True),  # a spike before moves nothing
        ([-5.0] * 10, -2.4, True),
        ([2.0] * 10, math.inf, True),
        ([2.0] * 10, math.nan, True),
        ([2.0] * 10, -99.0, False),
    ],
)
def test_what_a_spike_is(before: list[float], loss: float, spike: bool) -> None:
    assert is_spike(loss, before) is spike


def test_engines_name_the_samples_of_their_parts() -> None:
    """A real objective: two micro-batches, their shares add up to the loss."""
    import torch

    from megaswift.engine.diagnostics.compute_time import OwnComputeClock
    from megaswift.engine.objective import GlobalBatchCounts, GlobalBatchLossCallback, StepReport
    from megaswift.losses.contract import Batch
    from megaswift.losses.sft import CrossEntropy

    ones = torch.ones(2, 3, dtype=torch.int64)
    batches = [
        Batch(ones, ones, torch.ones(2, 3), ones, ones.bool(), sample_ids=torch.tensor(ids))
        for ids in ([4, 9], [7, -1])
    ]
    counted = GlobalBatchCounts({"label_weight": 12.0}, 12, 12, 2)
    objective = GlobalBatchLossCallback(CrossEntropy(), counted)
    fields = [torch.full((len(CrossEntropy().needs.names), 2, 3), -value) for value in (1.0, 3.0)]
    for batch, field in zip(batches, fields, strict=True):
        objective(batch, field)
    context: Any = SimpleNamespace(
        layout=SimpleNamespace(dp=1, pp=1), coordinates=SimpleNamespace(pp=0), device=torch.device("cpu"), groups=None
    )
    result = StepReport(objective, counted, context, batches, OwnComputeClock([])).read_result()
    assert result.loss == 2.0 and result.parts == (
        MicrobatchLossAndSamples(0.5, (4, 9)),
        MicrobatchLossAndSamples(1.5, (7,)),
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TrainingDiverged(Problem("step 7", "10 steps in a row", "a lower rate")), ": 10 steps in a row"),
        (
            ConfigError(Problem("--reward_funcs r.py:f", "raised ValueError\n  line 3", "")),
            ": --reward_funcs r.py:f: raised ValueError",
        ),
        (ConfigError("no room"), ": no room"),
    ],
)
def test_the_status_of_a_failed_run_has_its_reason_in_one_line(error: UserError, said: str) -> None:
    assert course.failure_reason(error, "step 7") == said
