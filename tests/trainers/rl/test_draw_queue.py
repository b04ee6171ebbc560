"""Random schedules of draws ahead in virtual time: the scheduler and its queue as a run has them, without threads.

Covers: megaswift/trainers/rl/draw_queue.py, megaswift/trainers/rl/scheduler.py.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from megaswift import distributed
from megaswift.data.batches.epoch_order import EpochOrder
from megaswift.data.prompts.source import Prompt, PromptSource
from megaswift.rollout.sampler import Completion
from megaswift.trainers.rl.draw_queue import DrawQueue
from megaswift.trainers.rl.scheduler import CompletionSamplingScheduler
from tests.trainers.rl.makers import Prompts

SCHEDULES = 10_000
PROMPTS = 64


class EngineFailedError(Exception):
    """The sampler died."""


class Share:
    """A rank's share of a draw, in the place of a future."""

    def __init__(self, world: World, completions: list[Completion]) -> None:
        self.world = world
        self.completions = completions
        world.free = max(world.free, world.clock) + world.seconds()
        self.end = world.free

    def done(self) -> bool:
        """Whether its time has come."""
        return self.world.clock >= self.end

    def result(self) -> list[Completion]:
        """Wait for it."""
        self.world.clock = max(self.world.clock, self.end)
        return self.completions


class World:
    """A trainer, one sampler and their clock; in the place of `CompletionGenerator` and of the thread."""

    def __init__(self, chance: random.Random, failing: float) -> None:
        self.chance = chance
        self.failing = failing
        self.tail = chance.choice([0.0, 0.3, 1.5])
        self.usual = chance.choice([0.1, 0.8, 1.0, 3.0])
        self.late = chance.choice([0.0, 0.5])
        """How often another rank has not finished what this one has."""
        self.clock = 0.0
        self.step = 0
        """Optimizer steps that the trainer has taken."""
        self.restart()

    def restart(self) -> None:
        """Forget what a sampler holds in memory."""
        self.free = self.clock
        self.weights = -1
        self.sampler = None
        self.engine = self

    def seconds(self) -> float:
        """How long a draw takes; a step takes about one second."""
        return self.usual * self.chance.lognormvariate(0.0, self.tail)

    def submit(self, work: Callable[[], list[Completion]]) -> Share:
        """Start a share behind those that are under way, with the weights that the sampler has."""
        return Share(self, work())

    def synchronize(self) -> None:
        """Give the sampler the trainer's weights, while it is idle."""
        assert self.clock >= self.free, "weights change under a draw"
        self.weights = self.step

    def write_share(self, prompts: Sequence[Prompt], number: int, greedy_every: int = 0) -> list[Completion]:
        """One token for each prompt: the draw's number; its log-probability is the version of the weights."""
        return [Completion((number,), (float(self.weights),), True) for _ in prompts]

    def gather(self, work: Callable[[], list[Completion]]) -> list[Completion]:
        """There is no other rank. A draw in the trainer's own time has the sampler for itself."""
        if not isinstance(getattr(work, "__self__", None), Share):
            assert self.clock >= self.free, "a draw beside another one"
            self.clock += self.seconds()
        if self.chance.random() < self.failing:
            raise EngineFailedError
        return work()

    def all_max(self, values: Sequence[float]) -> list[float]:
        """Another rank is late now and then."""
        return [max(value, self.chance.random() < self.late) for value in values]


def scheduler(world: World, most: int, steps: int) -> CompletionSamplingScheduler:
    """A process's own, two prompts a draw."""
    prompts: Any = Prompts()
    samples: Any = world
    made = CompletionSamplingScheduler(
        PromptSource(prompts, 2, EpochOrder(PROMPTS, False, 0)), samples, 1, DrawQueue(most, steps), _thread=samples
    )
    return made


def timed(part: str) -> Any:
    """Nothing is measured."""
    return nullcontext()


class Trainer:
    """The order of calls in `RolloutSource`, with saves, restarts and failures at random."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.steps = self.chance.choice([1, 1, 2, 4])
        self.most = self.chance.choice([0, 1, 2, 3, 4, 5, 8, 12])
        self.tries = self.chance.choice([1, 1, 3])
        self.world = World(self.chance, self.chance.choice([0.0, 0.0, 0.05]))
        self.trained: list[tuple[int, int]] = []
        """(draw, its age in optimizer steps) of everything that was trained on, with no step undone."""
        self.prompts: list[int] = []
        self.made = scheduler(self.world, self.most, self.steps)
        self.number = 0
        self.used = self.steps
        self.saved: dict[str, Any] = {}
        self.save()

    @property
    def due(self) -> int:
        """Of the next generation."""
        return self.world.step + self.steps - self.used

    def save(self) -> None:
        """A checkpoint."""
        position = {"number": self.number, "used": self.used, "step": self.world.step}
        position |= {"trained": [*self.trained], "prompts": [*self.prompts], "queue": self.made.state_dict()}
        self.saved = json.loads(json.dumps(position))

    def load(self) -> None:
        """A process of its own, from the last checkpoint."""
        self.world.restart()
        saved = self.saved
        self.made = scheduler(self.world, self.most, self.steps)
        self.number, self.used, self.world.step = saved["number"], saved["used"], saved["step"]
        self.trained = [tuple(pair) for pair in saved["trained"]]
        self.prompts = [*saved["prompts"]]
        self.made.load_state_dict(saved["queue"], self.due)

    def generate(self) -> None:
        """As `RolloutSource.sample` does."""
        for _ in range(self.chance.randint(1, self.tries)):
            prompts, completions = self.made.draw(self.number, self.world.step, timed)
            for completion in completions:
                (version,) = {version for version, _ in completion.versions}
                assert completion.logprobs == (float(version),), "stamped with other weights than it was sampled by"
                assert completion.token_ids == (self.number,)
            self.trained.append((self.number, self.world.step - int(completions[0].logprobs[0])))
            self.prompts += [prompt.number for prompt in prompts]
            self.number += 1

    def step(self) -> None:
        """As `RolloutSource.next` and the train loop do."""
        if self.used >= self.steps:
            self.generate()
            self.used = 0
        self.made.begin_ahead(self.number, self.world.step, self.due, timed)
        self.world.clock += self.chance.uniform(0.5, 1.5)
        self.used += 1
        self.world.step += 1

    def run(self, last: int) -> None:
        """Up to a step, however often it fails."""
        while self.world.step < last:
            try:
                self.step()
                event = self.chance.random()
                if event < 0.1:
                    self.save()
                elif event < 0.15:
                    self.load()
            except EngineFailedError:
                self.load()


@pytest.mark.parametrize("part", range(4))
def test_no_schedule_breaks_the_bound(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No token older than `max_staleness` is trained on, every prompt is trained on once and in order, and every run
    ends: 10,000 schedules with other lengths, speeds, late ranks, saves, restarts and failures."""
    older = ahead = 0
    for seed in range(part * SCHEDULES // 4, (part + 1) * SCHEDULES // 4):
        trainer = Trainer(seed)
        monkeypatch.setattr(distributed, "all_max", trainer.world.all_max)
        trainer.run(24)
        ages = [age for _, age in trainer.trained]
        assert all(0 <= age <= trainer.most for age in ages), seed
        assert [number for number, _ in trainer.trained] == [*range(len(ages))], seed
        assert trainer.prompts == [i % PROMPTS for i in range(2 * len(ages))], seed
        older += trainer.most > 0 and max(ages) == trainer.most
        ahead += any(ages)
    assert older > SCHEDULES // 16 and ahead > SCHEDULES // 8, "most of them sample ahead, many at the bound"
