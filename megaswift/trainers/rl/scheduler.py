"""Runs the draws that the queue schedules: in the trainer's thread, with offloading on a shared device, or ahead of
training in the background.

Owns the completions of draws under way, and the order on a device that trainer and sampler share: optimizer and
gradients leave, the sampler wakes, weights stream, the model's weights leave, completions are written, the sampler
sleeps, and everything comes back. The critic leaves at the beginning, because the sampler has no use for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import takewhile
from threading import Event, Lock
from typing import Any

import torch

from megaswift import distributed
from megaswift.data.prompts.source import Prompt, PromptSource
from megaswift.engine.protocol import Engine
from megaswift.errors import UserError
from megaswift.rollout.sampler import Completion
from megaswift.trainers.rl.draw_queue import DrawQueue, QueuedDraw
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
class Draw:
    """The prompts and the completions of a draw that has begun."""

    places: list[int]
    """Of its prompts, in their endless order."""
    prompts: list[Prompt]
    """Each once for each completion."""
    share: Callable[[], list[Completion]]
    """Returns this rank's completions: computes them, or waits for a thread that does."""
    present: Callable[[], bool]
    """Whether `share` would return at once."""
    written: list[Completion] = field(default_factory=list)
    """This rank's completions, as far as they were written when the sampler was last interrupted."""
    completions: list[Completion] | None = None
    """Those of all ranks, once they are gathered."""
    failed: bool = False
    """Whether it has no completions because sampling failed on some rank; a resumed run draws its prompts again."""


class WorkClock:
    """The seconds in which one thread at least is at work."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._workers = 0
        self._began = 0.0
        self._seconds = 0.0

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the time of the block; blocks of several threads may overlap."""
        self._add(1)
        try:
            yield
        finally:
            self._add(-1)

    def _add(self, workers: int) -> None:
        with self._lock:
            now = time.perf_counter()
            if self._workers:
                self._seconds += now - self._began
            self._began = now
            self._workers += workers

    def seconds(self) -> float:
        """Return the seconds up to this moment."""
        self._add(0)
        return self._seconds


@dataclass
class CompletionSamplingScheduler:
    """The draws of a run, seen from one rank."""

    prompts: PromptSource
    generation: CompletionGenerator
    draws: int
    """Completions of a prompt, the greedy one included."""
    queue: DrawQueue
    greedy: bool = False
    """The last completion of each prompt is greedy."""
    sleeps: bool = False
    """Whether the sampler gives its memory back between draws."""
    offloaded_parts: frozenset[str] = frozenset()
    """Parts of the trainer that leave the device during a draw: `optimizer`, `model`."""
    critic: Engine | None = None
    """The critic of `ppo`."""
    at_once: int = 1
    """Draws that the sampler may write at the same time in the background."""
    under_way: dict[int, Draw] = field(default_factory=dict)
    """The draws in the queue, by their numbers."""
    clock: WorkClock = field(default_factory=WorkClock)
    """The time in which this rank's sampler writes draws."""
    dropped: int = 0
    """Draws that were dropped since one was trained on."""
    pause: Callable[[], None] = partial(time.sleep, 0.05)
    """Waits before it is looked again for a draw that is finished."""
    _stop: Event = field(default_factory=Event)
    """Set while the sampler is interrupted."""
    _threads: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._threads = ThreadPoolExecutor(self.at_once, "sampler", _use_device, (device,))

    def draw(self, step: int, timed: Timed) -> tuple[int, Draw]:
        """Return the number of the draw that is trained on next, and the draw with its completions. Where the queue is
        empty, it begins with the present weights, which have taken `step` steps. Collective."""
        if self.queue.draws:
            with timed("generation"):
                self.finish_first()
        else:
            with self.lend_device(timed, has_weights=self.queue.version == step):
                self.queue.synchronized(step)
                self.begin(background=False)
                self.gather([self.queue.first().number])
        number = self.queue.take(step).number
        self.dropped = 0
        return number, self.under_way.pop(number)

    def finish_first(self) -> None:
        """Wait for the draw that is trained on next: the first one, or whichever is finished first. Collective."""
        if self.queue.overtakes:
            self.gather(self.arrived())
            while not self.queue.first().finished:
                self.pause()
                self.gather(self.arrived())
        self.gather([self.queue.first().number])

    def begin_ahead(self, step: int, due: int, timed: Timed) -> None:
        """Drop draws that have become too old, and begin in the background as many as the bound on staleness permits.
        The sampler gets the present weights first, unless it is writing with earlier ones and cannot be interrupted:
        then no draw begins. Collective.

        Args:
            step: Optimizer steps taken.
            due: Optimizer steps taken when the next generation begins.
        """
        stale = self.queue.drop_stale(due)
        count = self.queue.room(step, due)
        if not stale and not count and not self.queue.refreshes(step, due):
            return
        if self.queue.writing:
            self.gather(self.arrived())
        if self.queue.writing and not self.queue.interrupts:
            return
        if stale or (self.queue.version != step and (count or self.queue.writing)):
            with timed("weight sync"), self.interrupted(stale):
                if self.queue.version != step:
                    self.generation.synchronize()
                    self.queue.synchronized(step)
        for _ in range(count):
            self.begin(background=True)

    def begin(self, background: bool) -> None:
        """Take prompts, and begin to sample their completions with the weights that the sampler has."""
        number = self.queue.begun(again=bool(self.prompts.returned))
        places = self.prompts.take()
        draw = Draw(places, self.prompts_at(places), lambda: [], lambda: True)
        self.under_way[number] = draw
        if background:
            self.submit(number, draw)
        else:
            draw.share = partial(self.write, number, draw, self.queue.version)

    def submit(self, number: int, draw: Draw) -> None:
        """Let a thread write what is missing of this rank's share, with the weights that the sampler has."""
        future = self._threads.submit(partial(self.write, number, draw, self.queue.version))
        draw.share = future.result
        draw.present = future.done

    def write(self, number: int, draw: Draw, version: int) -> list[Completion]:
        """Write what is missing of this rank's share with the weights of `version`."""
        stop = self._stop.is_set if self.queue.interrupts else None
        with self.clock.working():
            written = self.generation.write_share(draw.prompts, number, self.greedy_every, draw.written, stop)
        draw.written = [with_version(completion, version) for completion in written]
        return draw.written

    @contextmanager
    def interrupted(self, stale: Sequence[int]) -> Iterator[None]:
        """Stop the sampler for the length of the block; the draws under way then go on from what is written, without
        those that are `stale`, whose prompts will be drawn again. Collective."""
        missing = [number for number, draw in self.under_way.items() if not draw.present()]

        def wait() -> None:
            for number in missing:
                self.under_way[number].share()

        self._stop.set()
        if self.queue.writing or stale:
            # Until every rank has stopped: ranks may share servers, which get the weights from one of them.
            with self.marking_failures():
                distributed.run_and_gather_on_all_ranks(wait)
        self._stop.clear()
        for number in stale:
            self.prompts.give_back(self.under_way.pop(number).places)
        self.dropped += len(stale)
        yield
        for number in missing:
            if number in self.under_way:
                self.submit(number, self.under_way[number])

    def arrived(self) -> list[int]:
        """Return the draws that every rank has sampled its share of. Collective."""
        late = distributed.all_max([not self.under_way[draw.number].present() for draw in self.queue.draws])
        return [draw.number for draw, missing in zip(self.queue.draws, late, strict=True) if not missing]

    def gather(self, numbers: Sequence[int]) -> None:
        """Wait for draws, and gather their completions on every rank. Collective."""
        with self.marking_failures():
            for queued in self.queue.draws:
                draw = self.under_way[queued.number]
                if queued.number in numbers and draw.completions is None:
                    draw.completions = self.generation.gather(draw.share)
        self.queue.mark_finished(numbers)

    @contextmanager
    def marking_failures(self) -> Iterator[None]:
        """Mark the draws without completions as failed if the block raises an error that all ranks raise."""
        try:
            yield
        except UserError:
            for draw in self.under_way.values():
                draw.failed = draw.completions is None
            raise

    def settle(self) -> None:
        """Wait for all draws that are under way. Collective."""
        self.gather([*self.under_way])

    def settle_usable(self) -> None:
        """Wait for all draws that are under way, and only mark those that fail: the error is raised where a draw is
        used. A run that ends by it can still save its position. Collective."""
        with suppress(UserError):
            self.gather([number for number, draw in self.under_way.items() if not draw.failed])

    def prompts_at(self, places: Sequence[int]) -> list[Prompt]:
        """Return the prompts at some places of their endless order, each once for each completion."""
        return [prompt for prompt in map(self.prompts.at, places) for _ in range(self.draws)]

    def lend_device(self, timed: Timed, has_weights: bool = False) -> AbstractContextManager[None]:
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

    def mark(self) -> Callable[[], None]:
        """Return a function that takes queue and prompts back to their present position. Cheap: draws that are under
        way stay under way."""
        draws = dict(self.under_way)
        queued = [replace(draw) for draw in self.queue.draws]
        trained = self.queue.trained
        prompts = self.prompts.state_dict()
        dropped = self.dropped

        def back() -> None:
            if self.under_way.keys() - draws.keys():
                self.settle_usable()  # the sampler is idle before other draws begin
            stopped = [number for number, draw in draws.items() if number not in self.under_way]
            self.under_way = dict(draws)
            self.queue.draws = [replace(draw) for draw in queued]
            self.queue.trained = trained
            self.prompts.load_state_dict(prompts)
            self.dropped = dropped
            for number in stopped:
                if draws[number].completions is None:
                    self.submit(number, draws[number])  # it was dropped since

        return back

    def state_dict(self) -> dict[str, Any]:
        """Wait for the draws that are under way, and return those before the first that failed; the prompts of the
        others will be drawn again. Collective."""
        self.settle_usable()
        queue = [(queued, self.under_way[queued.number]) for queued in self.queue.draws]
        usable = [*takewhile(lambda entry: not entry[1].failed, queue)]
        prompts = self.prompts.state_dict()
        left = [place for _, draw in queue[len(usable) :] for place in draw.places]
        return {
            "prompts": {**prompts, "returned": [*left, *prompts["returned"]]},
            "trained": self.queue.trained,
            "dropped": self.dropped,
            "draws": [
                {
                    "number": queued.number,
                    "version": queued.version,
                    "again": queued.again,
                    "places": draw.places,
                    "completions": [asdict(c) for c in draw.completions or ()],
                }
                for queued, draw in usable
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any], due: int) -> None:
        """Restore the queue and the position of the prompts. Draws of another size than this run's, or too old for it
        at the step `due` at which the next generation begins, are left out, and those after them where draws are
        trained on in order: their prompts are drawn again. Collective."""
        self.settle_usable()
        self.under_way = {}
        self.queue.draws = []
        self.queue.version = -1
        self.queue.trained = state["trained"]
        self.dropped = state["dropped"]
        self.prompts.load_state_dict(state["prompts"])
        left: list[int] = []
        for saved in state["draws"]:
            places = saved["places"]
            completions = [completion_from_dict(c) for c in saved["completions"]]
            age = due + len(self.queue.draws) * self.queue.steps - saved["version"]
            fits = len(places) == self.prompts.per_generation and len(completions) == len(places) * self.draws
            if not fits or age > self.queue.most or (left and not self.queue.overtakes):
                left += places
                continue
            restored = Draw(places, self.prompts_at(places), lambda: [], lambda: True, completions=completions)
            self.under_way[saved["number"]] = restored
            self.queue.draws.append(QueuedDraw(saved["number"], saved["version"], True, saved["again"]))
        self.prompts.give_back(left)

    def close(self) -> None:
        """Stop the background threads: at once if completions can be interrupted, else after the draws under way."""
        self._stop.set()
        self._threads.shutdown(wait=True, cancel_futures=True)


def _use_device(device: int | None) -> None:
    """Make a CUDA device the current one of this thread; None: there is none."""
    if device is not None:
        torch.cuda.set_device(device)


def with_version(completion: Completion, version: int) -> Completion:
    """Return the completion with `version` as that of the tokens which have none yet."""
    new = len(completion.token_ids) - sum(tokens for _, tokens in completion.versions)
    return replace(completion, versions=(*completion.versions, (version, new))) if new else completion


def completion_from_dict(state: Mapping[str, Any]) -> Completion:
    """Build a completion from what `asdict` returned."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list | tuple) else value for name, value in state.items()
    }
    values["versions"] = tuple((version, tokens) for version, tokens in values["versions"])
    if "own" not in values:
        return Completion(**values)
    values["further"] = tuple((place, tuple(prompt)) for place, prompt in values["further"])
    return MultiTurnCompletion(**values)
