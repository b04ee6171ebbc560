"""The schedule of draws ahead of training: how many may begin, with which weights, and which is trained on next.

A deterministic state machine without threads, clocks or ranks: events go in, and every rank that passes in the same
events gets the same decisions. Steps are optimizer steps of the run. Staleness is counted where the first step on a
generation begins; further steps on the same generation do not add to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class QueuedDraw:
    """A draw that has begun and is not trained on yet."""

    number: int
    version: int
    """Optimizer steps of the weights that write its first tokens."""
    finished: bool = False


@dataclass
class DrawQueue:
    """Draws that have begun, in the order in which they are trained on."""

    most: int
    """The largest staleness, in optimizer steps; 0: a draw begins when the trainer needs it."""
    steps: int
    """Optimizer steps on a generation."""
    interrupts: bool = False
    """Whether the sampler takes weights within a draw, and goes on with them."""
    draws: list[QueuedDraw] = field(default_factory=list)
    version: int = -1
    """Optimizer steps of the weights that the sampler has; -1: it has none, or they have no number."""

    @property
    def writing(self) -> bool:
        """Whether the sampler is at work."""
        return not all(draw.finished for draw in self.draws)

    def room(self, step: int, due: int) -> int:
        """Return how many more draws may begin with the weights of `step`.

        The draw at place q is trained on at `due + q * steps` at the latest, because a generation takes at least one.

        Args:
            step: Optimizer steps taken.
            due: Optimizer steps taken when the next generation begins, at least `step`.
        """
        longest = self.most - (due - step)
        return 0 if longest < 0 else max(0, longest // self.steps + 1 - len(self.draws))

    def refreshes(self, step: int, due: int) -> bool:
        """Return whether the draws under way go on with the weights of `step`: where a generation begins."""
        return self.interrupts and self.writing and self.version != step and due - step == self.steps

    def synchronized(self, step: int) -> None:
        """Note that the sampler has the weights of `step`."""
        assert self.interrupts or not self.writing, "the sampler is writing with other weights"
        self.version = step

    def synchronized_unnumbered(self) -> None:
        """Note that the sampler has weights that no draw begins with: an evaluation's. The run's steps are no number
        for them, because with ignore_data_skip they are not those that the queue counts."""
        assert not self.writing, "the sampler is writing with other weights"
        self.version = -1

    def begun(self, number: int) -> None:
        """Note a draw that begins with the sampler's weights."""
        assert self.version >= 0, "the sampler has no weights"
        self.draws.append(QueuedDraw(number, self.version))

    def finished(self, numbers: Sequence[int]) -> None:
        """Note draws whose completions are all there."""
        for draw in self.draws:
            draw.finished = draw.finished or draw.number in numbers

    def take(self, step: int) -> QueuedDraw:
        """Remove and return the draw that the generation at `step` trains on."""
        draw = self.draws.pop(0)
        assert draw.finished and step - draw.version <= self.most, f"draw {draw.number} at step {step}"
        return draw
