"""Schedules generation: synchronously, with offloading on a shared device, or asynchronously, one generation ahead of
training.

Owns the order on a device that trainer and sampler share: optimizer and gradients leave, the sampler wakes, weights
stream, the model's weights leave, completions are written, the sampler sleeps, everything comes back. What a critic has
leaves at the beginning: the sampler has no use for it. And the one draw that may be under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from megaswift.data.prompts.source import Prompt, PromptSource
from megaswift.engine.protocol import Engine
from megaswift.rollout.sampler import Completion
from megaswift.trainers.rl.generation import CompletionGenerator
from megaswift.trainers.rl.multi_turn import MultiTurnCompletion

Timed = Callable[[str], AbstractContextManager[None]]


@dataclass
class PendingDraw:
    """A draw that has begun."""

    before: dict[str, Any]
    """The position of the prompts before these were taken."""
    prompts: list[Prompt]
    number: int
    """The number of the generation."""
    future: Future[list[Completion]] | None
    """This rank's share, under way."""
    completions: list[Completion] = field(default_factory=list)
    """All of them, once `settle` has waited."""


@dataclass
class CompletionSamplingScheduler:
    """The draws of a run, seen from one rank."""

    prompts: PromptSource
    generation: CompletionGenerator
    draws: int
    """Completions of a prompt, the greedy one included."""
    greedy: bool = False
    """The last completion of each prompt is greedy."""
    asynchronous: bool = False
    sleeps: bool = False
    """The sampler gives its memory back between draws."""
    leaves: frozenset[str] = frozenset()
    """What of the trainer does meanwhile: `optimizer`, `model`."""
    critic: Engine | None = None
    """The critic of ppo."""
    ahead: PendingDraw | None = None
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "sampler"))

    def draw(self, number: int, again: bool, timed: Timed) -> tuple[list[Prompt], list[Completion]]:
        """Draw prompts and sample their completions; each prompt is listed once for each completion. `again`: the
        sampler has the weights already. Collective."""
        if self.ahead is not None:
            with timed("generation"):
                self.settle()
            pending = self.ahead
            self.ahead = None
            return pending.prompts, pending.completions
        prompts = self.take()
        with self.room(timed, again):
            return prompts, self.generation.write(prompts, number, self.greedy_every)

    def begin(self, number: int, timed: Timed) -> None:
        """Draws the next generation by the weights as they are, in the background. Collective."""
        with timed("weight sync"):
            self.generation.synchronize()
        before = self.prompts.state_dict()
        prompts = self.take()
        share = self._thread.submit(self.generation.share, prompts, number, self.greedy_every)
        self.ahead = PendingDraw(before, prompts, number, share)

    def settle(self) -> None:
        """Waits for the draw that is under way, where there is one. Collective."""
        if self.ahead is not None and self.ahead.future is not None:
            future = self.ahead.future
            self.ahead.future = None
            self.ahead.completions = self.generation.joined(future.result)

    def take(self) -> list[Prompt]:
        """Take the prompts of the next generation, each once for each completion."""
        return [prompt for prompt in self.prompts.next() for _ in range(self.draws)]

    @contextmanager
    def room(self, timed: Timed, again: bool) -> Iterator[None]:
        """Give the device's memory to the sampler inside the block, with the model's weights, and back to the trainer
        after it, in any case."""
        try:
            with timed("weight sync"):
                self.make_room(again)
            with timed("generation"):
                yield
        finally:
            with timed("weight sync"):
                if self.sleeps and self.generation.sampler is not None:
                    self.generation.sampler.sleep()
                if self.leaves:
                    for engine in self.engines:
                        engine.onload()

    @property
    def greedy_every(self) -> int:
        """Each completion, in order, whose number (from 1) is a multiple of this is greedy; 0: none."""
        return self.draws if self.greedy else 0

    @property
    def engines(self) -> list[Engine]:
        """What has memory on the device: the policy's, and the critic's."""
        return [self.generation.engine, *(() if self.critic is None else (self.critic,))]

    def make_room(self, again: bool) -> None:
        """Hand the device to the sampler, step by step, up to the first prompt. Collective."""
        policy, *others = self.engines
        if self.leaves:
            for other in others:
                other.offload(self.leaves)
            policy.offload(self.leaves - {"model"})
        if self.sleeps or not again:
            self.generation.synchronize()
        if "model" in self.leaves:
            policy.offload(frozenset({"model"}))

    def state_dict(self) -> dict[str, Any]:
        """Wait for the draw that is under way, and return it."""
        self.settle()
        if self.ahead is None:
            return {}
        return {
            "before": self.ahead.before,
            "number": self.ahead.number,
            "completions": [asdict(c) for c in self.ahead.completions],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore that draw, and move the prompts on past it."""
        self.settle()
        self.ahead = None
        if state:
            self.prompts.load_state_dict(state["before"])
            completions = [completion_from_dict(c) for c in state["completions"]]
            self.ahead = PendingDraw(dict(state["before"]), self.take(), int(state["number"]), None, completions)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def completion_from_dict(state: Mapping[str, Any]) -> Completion:
    """Build a completion from what `asdict` returned."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list | tuple) else value for name, value in state.items()
    }
    return MultiTurnCompletion(**values) if "own" in values else Completion(**values)
