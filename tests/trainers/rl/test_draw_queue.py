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
TOKENS = 4
"""Of a completion."""


class EngineFailedError(Exception):
    """The sampler died."""


class Share:
    """A rank's share of a draw, in the place of a future. A sampler that is interrupted has written what its time was
    enough for."""

    def __init__(self, world: World, work: Callable[[], list[Completion]]) -> None:
        self.world = world
        self.work = work
        self.weights = world.weights
        self.begin = world.clock if world.parallel else max(world.free, world.clock)
        # how long it will take: written for no time, to see what is missing
        world.window, world.writing_weights = 0, self.weights
        missing = max(TOKENS - len(completion.token_ids) for completion in world.peek(work))
        self.pace = world.seconds() / TOKENS
        self.end = self.begin + missing * self.pace
        world.free = max(world.free, self.end)
        world.shares.append(self)
        self.written: list[Completion] | None = None

    def done(self) -> bool:
        """Whether its time has come."""
        return self.written is not None or self.world.clock >= self.end

    def result(self) -> list[Completion]:
        """Wait for it, or stop it."""
        world = self.world
        if self.written is None:
            if world.stopped and world.clock < self.end:
                world.window = max(0, int((world.clock - self.begin) / self.pace))
                world.free = world.clock
            else:
                world.clock = max(world.clock, self.end)
                world.window = TOKENS
            world.writing_weights = self.weights
            self.written = self.work()
        return self.written


class World:
    """A trainer, one sampler and their clock; in the place of `CompletionGenerator`, the thread and the event.
    `parallel`: the sampler works on all draws at the same time."""

    def __init__(self, chance: random.Random, failing: float, interrupts: bool, parallel: bool = False) -> None:
        self.chance = chance
        self.failing = failing
        self.interrupts = interrupts
        self.parallel = parallel
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
        self.stopped = False
        self.window = TOKENS
        self.writing_weights = -1
        self.sampler = None
        self.engine = self
        self.shares: list[Share] = []

    def set(self) -> None:
        """The sampler is stopped."""
        self.stopped = True

    def clear(self) -> None:
        """It may go on."""
        self.stopped = False

    def is_set(self) -> bool:
        """Whether it is stopped."""
        return self.stopped

    def pause(self) -> None:
        """Wait until a share has ended, or for another rank."""
        self.shares = [share for share in self.shares if not share.done()]
        self.clock = min((share.end for share in self.shares), default=self.clock + 0.1)

    def seconds(self) -> float:
        """How long a draw takes; a step takes about one second."""
        return self.usual * self.chance.lognormvariate(0.0, self.tail)

    def submit(self, work: Callable[[], list[Completion]]) -> Share:
        """Start a share behind those that are under way, with the weights that the sampler has."""
        return Share(self, work)

    @staticmethod
    def peek(work: Any) -> list[Completion]:
        """What of a share is written before it begins."""
        _, draw, _ = work.args
        return draw.written or [Completion((), (), False)]

    def synchronize(self) -> None:
        """Give the sampler the trainer's weights, while it is idle or stopped."""
        assert self.stopped or self.clock >= self.free, "weights change under a draw"
        self.weights = self.step

    def write_share(
        self,
        prompts: Sequence[Prompt],
        number: int,
        greedy_every: int = 0,
        begun: Sequence[Completion] = (),
        stop: Callable[[], bool] | None = None,
    ) -> list[Completion]:
        """Up to four tokens for each prompt, the draw's number; log-probabilities are the version of the weights."""
        assert (stop is not None) == self.interrupts
        written = []
        for completion in begun or [Completion((), (), False)] * len(prompts):
            more = min(self.window, TOKENS - len(completion.token_ids))
            tokens = completion.token_ids + (number,) * more
            logprobs = completion.logprobs + (float(self.writing_weights),) * more
            written.append(Completion(tokens, logprobs, len(tokens) == TOKENS, versions=completion.versions))
        return written

    def gather(self, work: Callable[[], list[Completion]]) -> list[Completion]:
        """There is no other rank. A draw in the trainer's own time has the sampler for itself."""
        if not isinstance(getattr(work, "__self__", None), Share):
            assert self.clock >= self.free, "a draw beside another one"
            self.clock += self.seconds()
            self.window, self.writing_weights = TOKENS, self.weights
        if self.chance.random() < self.failing:
            raise EngineFailedError
        return work()

    def all_max(self, values: Sequence[float]) -> list[float]:
        """Another rank is late now and then."""
        return [max(value, self.chance.random() < self.late) for value in values]


def scheduler(
    world: World, most: int, steps: int, overtakes: bool = False, last: int | None = None
) -> CompletionSamplingScheduler:
    """A process's own, two prompts a draw."""
    prompts: Any = Prompts()
    samples: Any = world
    made = CompletionSamplingScheduler(
        PromptSource(prompts, 2, EpochOrder(PROMPTS, False, 0)),
        samples,
        1,
        DrawQueue(most, steps, world.interrupts, overtakes, last),
        _stop=samples,
    )
    made._threads = samples
    made.pause = world.pause
    return made


def timed(part: str) -> Any:
    """Nothing is measured."""
    return nullcontext()


class Trainer:
    """The order of calls in `RolloutSource`, with saves, restarts and failures at random."""

    def __init__(self, seed: int, last: int) -> None:
        self.chance = random.Random(seed)
        self.last = last
        self.steps = self.chance.choice([1, 1, 2, 4])
        self.most = self.chance.choice([0, 1, 2, 3, 4, 5, 8, 12])
        self.tries = self.chance.choice([1, 1, 3])
        interrupts = self.chance.random() < 0.5
        parallel = self.chance.random() < 0.5
        self.overtakes = parallel and self.chance.random() < 0.7
        self.world = World(self.chance, self.chance.choice([0.0, 0.0, 0.05]), interrupts, parallel)
        self.trained: list[tuple[int, int, int]] = []
        """(draw, the ages of its oldest and its newest token in optimizer steps) of everything that was trained on,
        with no step undone."""
        self.places: list[int] = []
        """Of the prompts that were trained on."""
        self.dropped: list[int] = []
        """Places of prompts whose draw was dropped."""
        self.made = scheduler(self.world, self.most, self.steps, self.overtakes, last)
        self.used = self.steps
        self.saved: dict[str, Any] = {}
        self.save()

    @property
    def due(self) -> int:
        """Of the next generation."""
        return self.world.step + self.steps - self.used

    def save(self) -> None:
        """A checkpoint."""
        position = {"used": self.used, "step": self.world.step, "dropped": [*self.dropped]}
        position |= {"trained": [*self.trained], "places": [*self.places], "queue": self.made.state_dict()}
        self.saved = json.loads(json.dumps(position))

    def load(self) -> None:
        """A process of its own, from the last checkpoint."""
        self.world.restart()
        saved = self.saved
        self.made = scheduler(self.world, self.most, self.steps, self.overtakes, self.last)
        self.used, self.world.step, self.dropped = saved["used"], saved["step"], [*saved["dropped"]]
        self.trained = [tuple(draw) for draw in saved["trained"]]
        self.places = [*saved["places"]]
        self.made.load_state_dict(saved["queue"], self.due)

    def generate(self) -> None:
        """As `RolloutSource.sample` does."""
        for _ in range(self.chance.randint(1, self.tries)):
            number, draw = self.made.draw(self.world.step, timed)
            assert draw.completions is not None
            for completion in draw.completions:
                versions = [float(version) for version, tokens in completion.versions for _ in range(tokens)]
                assert [*completion.logprobs] == versions, "stamped with other weights than it was sampled by"
                assert completion.token_ids == (number,) * TOKENS and completion.finished
            sampled = draw.completions[0].logprobs
            self.trained.append((number, *(self.world.step - int(v) for v in (sampled[0], sampled[-1]))))
            assert [prompt.number for prompt in draw.prompts] == [place % PROMPTS for place in draw.places]
            self.places += draw.places

    def step(self) -> None:
        """As `RolloutSource.next` and the train loop do."""
        if self.used >= self.steps:
            self.generate()
            self.used = 0
        before = dict(self.made.under_way)
        self.made.begin_ahead(self.world.step, self.due, timed)
        gone = before.keys() - self.made.under_way.keys()
        self.dropped += [place for number in gone for place in before[number].places]
        assert len({*self.dropped}) == len(self.dropped), "prompts are dropped twice"
        self.world.clock += self.chance.uniform(0.5, 1.5)
        self.used += 1
        self.world.step += 1

    def run(self) -> None:
        """Up to the last step, however often it fails."""
        while self.world.step < self.last:
            try:
                self.step()
                event = self.chance.random()
                if event < 0.1:
                    self.save()
                elif event < 0.15:
                    self.load()
            except EngineFailedError:
                self.load()


@pytest.mark.wide
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2, 3))])
def test_no_schedule_breaks_the_bound(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No token older than `max_staleness` is trained on, every prompt is trained on once, in order unless draws are
    overtaken, none is dropped twice, and every run ends: 10,000 schedules with other lengths, speeds, late ranks,
    saves, restarts and failures."""
    older = ahead = mixed = overtaken = dropped = 0
    for seed in range(part * SCHEDULES // 4, (part + 1) * SCHEDULES // 4):
        trainer = Trainer(seed, last=24)
        monkeypatch.setattr(distributed, "all_max", trainer.world.all_max)
        trainer.run()
        ages = [age for _, age, _ in trainer.trained]
        assert all(0 <= newest <= age <= trainer.most for _, age, newest in trainer.trained), seed
        numbers = [number for number, _, _ in trainer.trained]
        prompts = trainer.made.prompts
        waiting = [place for draw in trainer.made.under_way.values() for place in draw.places]
        assert sorted([*trainer.places, *waiting, *prompts.returned]) == [*range(prompts._taken)], seed
        if not trainer.overtakes:
            assert numbers == [*range(len(ages))] and trainer.places == [*range(2 * len(ages))], seed
        assert len({*numbers}) == len(numbers), seed
        assert trainer.tries > 1 or not waiting, "a draw began that no step uses"
        overtaken += numbers != sorted(numbers)
        dropped += bool(trainer.dropped)
        older += trainer.most > 0 and max(ages) == trainer.most
        ahead += any(ages)
        mixed += any(newest < age for _, age, newest in trainer.trained)
    assert older > SCHEDULES // 16 and ahead > SCHEDULES // 8, "most of them sample ahead, many at the bound"
    assert mixed > SCHEDULES // 40, "completions are interrupted"
    assert overtaken > SCHEDULES // 80 and dropped > SCHEDULES // 500, (overtaken, dropped)


def test_the_last_generation_may_have_fewer_steps() -> None:
    """It is drawn ahead like any other, and none for steps after the run's last."""
    for last, places in ((4, 0), (5, 1), (8, 1), (9, 2), (99, 2)):
        assert DrawQueue(8, 4, last=last).room(0, 4) == places
