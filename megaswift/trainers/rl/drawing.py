"""When completions are drawn: now, with the memory that the trainer can spare, or ahead, while it trains on those before.

Owns the order on a device that trainer and sampler share: optimizer and gradients leave, the sampler wakes, weights stream, the model's
weights leave, completions are written, the sampler sleeps, everything comes back. And the one draw that may be under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from megaswift.data.prompts import Prompt, PromptSource
from megaswift.inference.rollout import Completion
from megaswift.trainers.rl.conversation import Conversation
from megaswift.trainers.rl.generation import Generation

Timed = Callable[[str], AbstractContextManager[None]]


@dataclass
class Ahead:
    """A draw that has begun."""

    place: int
    """Prompts taken before these."""
    number: int
    """Of the generation."""
    found: Future[list[Completion]] | None
    """This rank's share, under way."""
    completions: list[Completion] = field(default_factory=list)
    """All of them, once `settle` has waited."""


@dataclass
class Drawing:
    """The draws of a run, seen from one rank."""

    prompts: PromptSource
    generation: Generation
    group: int
    asynchronous: bool = False
    sleeps: bool = False
    """The sampler gives its memory back between draws."""
    leaves: frozenset[str] = frozenset()
    """What of the trainer does meanwhile: `optimizer`, `model`."""
    ahead: Ahead | None = None
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "sampler"))

    def draw(self, number: int, again: bool, timed: Timed) -> tuple[list[Prompt], list[Completion]]:
        """Prompts, each as often as it has completions, and these. `again`: the sampler has the weights already. Collective."""
        if self.ahead is not None:
            with timed("generation"):
                self.settle()
            found, self.ahead = self.ahead, None
            return self.repeated(found.place), found.completions
        place = self.take()
        with self.room(timed, again):
            return self.repeated(place), self.generation.write(self.repeated(place), number)

    def begin(self, number: int, timed: Timed) -> None:
        """Draws the next generation by the weights as they are, in the background. Collective."""
        with timed("weight sync"):
            self.generation.synchronise()
        place = self.take()
        self.ahead = Ahead(place, number, self._thread.submit(self.generation.share, self.repeated(place), number))

    def settle(self) -> None:
        """Waits for the draw that is under way, where there is one. Collective."""
        if self.ahead is not None and self.ahead.found is not None:
            found, self.ahead.found = self.ahead.found, None
            self.ahead.completions = self.generation.joined(found.result)

    def take(self) -> int:
        """The place of the next prompts, which are then taken."""
        place = int(self.prompts.state_dict()["rows_taken"])
        self.prompts.next()
        return place

    def repeated(self, place: int) -> list[Prompt]:
        """The prompts of a generation from this place on, each as often as it has completions."""
        which = self.prompts.order.slice(place, place + self.prompts.per_generation)
        return [prompt for i in which for prompt in [self.prompts.prompts.read(int(i))] * self.group]

    @contextmanager
    def room(self, timed: Timed, again: bool) -> Iterator[None]:
        """The device's memory belongs to the sampler inside, which then has the model's weights."""
        engine = self.generation.engine
        with timed("weight sync"):
            if self.leaves:
                engine.offload(self.leaves - {"model"})
            if self.sleeps or not again:
                self.generation.synchronise()
            if "model" in self.leaves:
                engine.offload(frozenset({"model"}))
        try:
            with timed("generation"):
                yield
        finally:
            with timed("weight sync"):
                if self.sleeps and self.generation.sampler is not None:
                    self.generation.sampler.sleep()
                if self.leaves:
                    engine.onload()

    def state_dict(self) -> dict[str, Any]:
        """The draw that is under way; waits for it."""
        self.settle()
        if self.ahead is None:
            return {}
        return {"place": self.ahead.place, "number": self.ahead.number, "completions": [asdict(c) for c in self.ahead.completions]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse."""
        self.settle()
        self.ahead = None
        if state:
            self.ahead = Ahead(int(state["place"]), int(state["number"]), None, [completion_of(c) for c in state["completions"]])

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def completion_of(state: Mapping[str, Any]) -> Completion:
    """The inverse of `asdict`."""
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list | tuple) else value for name, value in state.items()}
    return Conversation(**values) if "own" in values else Completion(**values)
