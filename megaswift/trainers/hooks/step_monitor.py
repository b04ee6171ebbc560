"""Monitors steps: warns about skipped steps and loss spikes, and stops a diverged run.

Owns when a run has learned nothing (exit code 3, docs/training.md) and what a spike of the loss is. Rows have the
numbers of other messages, from 1.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from megaswift import distributed
from megaswift.engine.protocol import MicrobatchLossAndSamples, StepResult
from megaswift.errors import EXIT_NO_PROGRESS, Problem, UserError
from megaswift.log import count_text
from megaswift.trainers.hook import Hook, Run, StepRecord
from megaswift.trainers.hooks.progress import print_warning

MOST_IN_A_ROW = 10
"""So many skipped steps one after another end the run: the weights no longer change."""
LAST_IN_A_ROW = 3
"""A run whose last steps, so many or more, were skipped has failed."""
WINDOW = 50
"""Maximum number of losses that a new one is compared with."""
ENOUGH = 10
"""Minimum number of losses that a new one is compared with."""
# A loss is a spike above the median + the largest of these three.
SPREADS = 10.0
"""So many median absolute deviations."""
SHARE = 0.5
"""This share of the median's size."""
LEAST = 1.0
"""This value."""
MOST_ROWS = 8
"""Rows that a message names."""
FIX = "use a lower --learning_rate or more --warmup_steps, or inspect the data with `megaswift data show`"


class TrainingDiverged(UserError):
    """The run no longer learns."""

    title = "training failed: its steps were skipped"
    exit_code = EXIT_NO_PROGRESS


class SkippedStepAndLossSpikeMonitor(Hook):
    """Counts skipped steps, remembers losses."""

    def __init__(self, most: int = MOST_IN_A_ROW, of: str = "") -> None:
        self.most = most
        self.of = of
        self.in_a_row = self.at_the_end = self.skipped = self.steps = 0
        self.losses: deque[float] = deque(maxlen=WINDOW)

    def on_step(self, run: Run, step: StepRecord) -> None:
        """Warns of a skipped step or a spike; `TrainingDiverged` after `most` skipped steps in a row."""
        self.steps += 1
        loss = step.result.loss
        if not self.skips(step.number, step.result):
            if is_spike(loss, self.losses):  # the same on every rank, as worst_microbatches_text needs
                print_warning(
                    f"step {step.number}: loss {loss:.4g} is far above the median {statistics.median(self.losses):.4g} "
                    f"of the {len(self.losses)} steps before; the step was "
                    f"taken{worst_microbatches_text(step.result.parts)}"
                )
            if math.isfinite(loss):
                self.losses.append(loss)

    def skips(self, number: int, result: StepResult) -> bool:
        """Return whether the step was skipped; warns then. `TrainingDiverged` after `most` in a row."""
        if not result.skipped:
            self.in_a_row = self.at_the_end = 0
            return False
        self.at_the_end += 1
        self.skipped += 1
        step = f"step {number}{self.of}"
        if result.loss_scale_falling:  # not towards MOST_IN_A_ROW: a lower scale may do
            print_warning(f"{step} was skipped: a gradient overflows float16; the loss scale is lowered")
            return True
        self.in_a_row += 1
        print_warning(
            f"{step} was skipped: its gradient is not finite (loss {result.loss:.4g}); {self.in_a_row} in a row"
            f"{worst_microbatches_text(result.parts)}"
        )
        if self.in_a_row >= self.most:
            raise TrainingDiverged(
                Problem(
                    step,
                    f"{self.in_a_row} steps in a row had a gradient that is not finite",
                    f"resume from an earlier checkpoint (--resume_from_checkpoint) and {FIX}",
                )
            )
        return True

    def on_end(self, run: Run) -> None:
        """Check progress before the last checkpoint, so that a run that has learned nothing keeps its earlier ones."""
        if not run.interrupted and run.step >= run.total_steps:
            self.check_progress(run)

    def check_progress(self, run: Run) -> None:
        """Raise `TrainingDiverged` at the end of a run that learned nothing; warn where steps were skipped."""
        last = self.at_the_end
        if last >= LAST_IN_A_ROW or (last and last == self.skipped == run.step):
            what = "every step" if last == run.step else f"the last {count_text(last, 'step')}"
            raise TrainingDiverged(
                Problem(
                    f"step {run.step}{self.of}",
                    f"{self.skipped} of {count_text(run.step, 'step')} were skipped, among them {what}: the gradient "
                    "was not finite, so the weights did not change. Nothing was exported",
                    FIX,
                )
            )
        if self.skipped:
            print_warning(
                f"{self.skipped} of {count_text(run.step, 'step')}{self.of} were skipped: the gradient was not finite"
            )

    def summary(self) -> str:
        """Describe skipped steps for the status of the report; empty where no step was skipped."""
        return f", {count_text(self.skipped, 'step')} skipped (gradient not finite)" if self.skipped else ""

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of skipped steps and the last losses."""
        return {
            "in_a_row": self.in_a_row,
            "at_the_end": self.at_the_end,
            "skipped": self.skipped,
            "losses": list(self.losses),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts and losses; older checkpoints count only the steps in a row."""
        self.in_a_row = int(state["in_a_row"])
        self.at_the_end = int(state.get("at_the_end", self.in_a_row))
        self.skipped = int(state.get("skipped", self.in_a_row))
        self.losses = deque(state.get("losses", ()), maxlen=WINDOW)


def is_spike(loss: float, before: Sequence[float]) -> bool:
    """Return whether a loss is far above those before: by median and median absolute deviation, which a spike among
    them does not move."""
    if len(before) < ENOUGH:
        return False
    median = statistics.median(before)
    deviation = statistics.median(abs(value - median) for value in before)
    return not loss <= median + max(SPREADS * deviation, SHARE * abs(median), LEAST)


def worst_microbatches_text(parts: Sequence[MicrobatchLossAndSamples]) -> str:
    """`; rank 1, rows 7, 12`: micro-batches whose loss is not finite, else the one with the largest. Collective."""
    worst = worst_microbatches(
        [(rank, part) for rank, own in enumerate(distributed.all_gather_objects(list(parts))) for part in own]
    )
    return "".join(
        f"; rank {rank}, " + ("rows " if len(part.samples) > 1 else "row ") + _numbers(part.samples)
        for rank, part in worst
        if part.samples
    )


def worst_microbatches(
    parts: Sequence[tuple[int, MicrobatchLossAndSamples]],
) -> list[tuple[int, MicrobatchLossAndSamples]]:
    """Return the micro-batches to name, each with its rank: all with a loss that is not finite, else the one with the
    largest. Ranks that share their data are named once."""
    once = {part.samples: (rank, part) for rank, part in reversed(parts)}.values()
    bad = sorted(one for one in once if not math.isfinite(one[1].loss))
    return bad[:MOST_ROWS] or sorted(once, key=lambda one: one[1].loss)[-1:]


def _numbers(samples: Sequence[int]) -> str:
    more = f" and {len(samples) - MOST_ROWS} more" if len(samples) > MOST_ROWS else ""
    return ", ".join(str(i + 1) for i in samples[:MOST_ROWS]) + more
