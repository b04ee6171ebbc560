"""The schedule of draws ahead of training: how many may begin, with which weights, and which is trained on next.

A deterministic state machine without threads, clocks or ranks: events go in, and every rank that passes in the same
events gets the same decisions. Steps are optimizer steps of the run. Staleness is counted where the first step on a
generation begins; further steps on the same generation do not add to it.

Draws are trained on in the order in which they began, or, with `overtakes`, in the order in which they are finished: a
slow one then holds up no others. One that becomes too old for it is dropped, and its prompts are drawn again. That draw
is not overtaken, so that it is not dropped too: the age of a draw whose place in the queue is known is bounded when it
begins.
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
    again: bool = False
    """Whether it has prompts of a draw that was dropped."""


@dataclass
class DrawQueue:
    """Draws that have begun, in their order."""

    most: int
    """The largest staleness, in optimizer steps; 0: a draw begins when the trainer needs it."""
    steps: int
    """Optimizer steps on a generation."""
    interrupts: bool = False
    """Whether the sampler takes weights within a draw, and goes on with them."""
    overtakes: bool = False
    """Whether draws that are finished are trained on before others that began earlier."""
    last: int | None = None
    """Optimizer steps of the run; no draw begins for a later step. None: not known."""
    draws: list[QueuedDraw] = field(default_factory=list)
    version: int = -1
    """Optimizer steps of the weights that the sampler has; -1: it has none, or they have no number."""
    trained: int = -1
    """The largest number of a draw that was trained on; -1: none was."""

    @property
    def writing(self) -> bool:
        """Whether the sampler is at work."""
        return not all(draw.finished for draw in self.draws)

    @property
    def next_number(self) -> int:
        """The number of the next draw that begins."""
        return 1 + max([self.trained, *(draw.number for draw in self.draws)])

    def room(self, step: int, due: int) -> int:
        """Return how many more draws may begin with the weights of `step`.

        The draw at place q is trained on at `due + q * steps` at the latest, because a generation takes at least one.

        Args:
            step: Optimizer steps taken.
            due: Optimizer steps taken when the next generation begins, at least `step`.
        """
        longest = self.most - (due - step)
        places = 0 if longest < 0 else longest // self.steps + 1
        if self.last is not None:
            places = min(places, -(-(self.last - due) // self.steps))
        return max(0, places - len(self.draws))

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

    def begun(self, again: bool = False) -> int:
        """Note a draw that begins with the sampler's weights, and return its number. `again`: some of its prompts were
        drawn before."""
        assert self.version >= 0, "the sampler has no weights"
        number = self.next_number
        self.draws.append(QueuedDraw(number, self.version, again=again))
        return number

    def mark_finished(self, numbers: Sequence[int]) -> None:
        """Note draws whose completions are all there."""
        for draw in self.draws:
            draw.finished = draw.finished or draw.number in numbers

    def first(self) -> QueuedDraw:
        """Return the draw that is trained on next: the first one, or the first that is finished and passes none that
        was begun again."""
        for draw in self.draws if self.overtakes else ():
            if draw.finished:
                return draw
            if draw.again:
                break
        return self.draws[0]

    def take(self, step: int) -> QueuedDraw:
        """Remove and return the draw that the generation at `step` trains on."""
        draw = self.first()
        assert draw.finished and step - draw.version <= self.most, f"draw {draw.number} at step {step}"
        self.draws.remove(draw)
        self.trained = max(self.trained, draw.number)
        return draw

    def drop_stale(self, due: int) -> list[int]:
        """Remove the draws that would be too old at `due`, the first step on the next generation, and return their
        numbers."""
        stale = [draw for draw in self.draws if due - draw.version > self.most]
        assert not stale or (self.overtakes and self.interrupts), "a draw has become too old in its turn"
        assert not any(draw.again for draw in stale), "a draw that nothing overtakes has become too old"
        self.draws = [draw for draw in self.draws if draw not in stale]
        return [draw.number for draw in stale]
