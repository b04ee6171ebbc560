"""Schedules generation: synchronously, with offloading on a shared device, or asynchronously, one generation ahead of
training.

Owns the draw that may be under way, and the order on a device that trainer and sampler share: optimizer and gradients
leave, the sampler wakes, weights stream, the model's weights leave, completions are written, the sampler sleeps, and
everything comes back. The critic leaves at the beginning, because the sampler has no use for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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


@contextmanager
def lend_device(
    generation: CompletionGenerator,
    engines: Sequence[Engine],
    offloaded: frozenset[str],
    sleeps: bool,
    has_weights: bool,
    timed: Timed,
) -> Iterator[None]:
    """Lend the device's memory to a sampler for the length of the block, and give it the model's weights. The trainer
    gets the memory back even if the block fails. Collective.

    Args:
        generation: The sampler.
        engines: The engines that have memory on the device, the one that the sampler writes for first.
        offloaded: Parts of the trainer that leave the device: `optimizer`, `model`.
        sleeps: Whether the sampler gives its memory back after the block.
        has_weights: Whether the sampler has the weights already.
        timed: Adds the time of a block to a part of the step.
    """
    policy, *others = engines
    try:
        with timed("weight sync"):
            # Free the device step by step, so that the sampler can start.
            if offloaded:
                for other in others:
                    other.offload(offloaded)
                policy.offload(offloaded - {"model"})
            if sleeps or not has_weights:
                generation.synchronize()
            if "model" in offloaded:
                policy.offload(frozenset({"model"}))
        with timed("generation"):
            yield
    finally:
        with timed("weight sync"):
            if sleeps and generation.sampler is not None:
                generation.sampler.sleep()
            if offloaded:
                for engine in engines:
                    engine.onload()


@dataclass
class PendingDraw:
    """A draw that has begun."""

    before: dict[str, Any]
    """The position of the prompts before these were taken."""
    prompts: list[Prompt]
    number: int
    """The number of the generation."""
    version: int
    """Optimizer steps that its weights have taken."""
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
    """Whether the sampler gives its memory back between draws."""
    offloaded_parts: frozenset[str] = frozenset()
    """Parts of the trainer that leave the device during a draw: `optimizer`, `model`."""
    critic: Engine | None = None
    """The critic of `ppo`."""
    ahead: PendingDraw | None = None
    """The draw that is under way or waits to be used."""
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "sampler"))

    def draw(self, number: int, has_weights: bool, timed: Timed) -> tuple[list[Prompt], list[Completion]]:
        """Draw prompts and sample their completions; each prompt is listed once for each completion. `has_weights`: the
        sampler has the weights already. Collective."""
        if self.ahead is not None:
            with timed("generation"):
                self.settle()
            pending = self.ahead
            self.ahead = None
            return pending.prompts, pending.completions
        prompts = self.take_prompts()
        with self.lend_device(timed, has_weights):
            return prompts, self.generation.write(prompts, number, self.greedy_every)

    def begin(self, number: int, version: int, timed: Timed) -> None:
        """Start to draw the next generation in the background, with the present weights, which have taken `version`
        steps. Collective."""
        with timed("weight sync"):
            self.generation.synchronize()
        before = self.prompts.state_dict()
        prompts = self.take_prompts()
        share = self._thread.submit(self.generation.write_share, prompts, number, self.greedy_every)
        self.ahead = PendingDraw(before, prompts, number, version, share)

    def settle(self) -> None:
        """Wait for the draw that is under way, if there is one. Collective."""
        if self.ahead is not None and self.ahead.future is not None:
            future = self.ahead.future
            self.ahead.future = None
            self.ahead.completions = self.generation.gather(future.result)

    def take_prompts(self) -> list[Prompt]:
        """Take the prompts of the next generation, each once for each completion."""
        return [prompt for prompt in self.prompts.next() for _ in range(self.draws)]

    def lend_device(self, timed: Timed, has_weights: bool) -> AbstractContextManager[None]:
        """Return a context in which the sampler has the device and the model's weights."""
        return lend_device(self.generation, self.engines, self.offloaded_parts, self.sleeps, has_weights, timed)

    @property
    def greedy_every(self) -> int:
        """The interval of greedy completions: those whose number (from 1) is a multiple of it; 0: none is greedy."""
        return self.draws if self.greedy else 0

    @property
    def engines(self) -> list[Engine]:
        """The engines that have memory on the device: the policy's, and the critic's."""
        return [self.generation.engine, *(() if self.critic is None else (self.critic,))]

    def state_dict(self) -> dict[str, Any]:
        """Wait for the draw that is under way, and return it."""
        self.settle()
        if self.ahead is None:
            return {}
        return {
            "before": self.ahead.before,
            "number": self.ahead.number,
            "version": self.ahead.version,
            "completions": [asdict(c) for c in self.ahead.completions],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the draw that `state_dict` returned, and move the prompts on past it."""
        self.settle()
        self.ahead = None
        if state:
            self.prompts.load_state_dict(state["before"])
            completions = [completion_from_dict(c) for c in state["completions"]]
            numbers = (int(state["number"]), int(state.get("version", 0)))
            self.ahead = PendingDraw(dict(state["before"]), self.take_prompts(), *numbers, None, completions)

    def close(self) -> None:
        """Stop the background thread, after the draw that is under way."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def completion_from_dict(state: Mapping[str, Any]) -> Completion:
    """Build a completion from what `asdict` returned."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list | tuple) else value for name, value in state.items()
    }
    return MultiTurnCompletion(**values) if "own" in values else Completion(**values)
