"""How long a trainer waits for a sampler, compared with what the schedule of draws makes unavoidable.

Covers: megaswift/trainers/rl/scheduler.py, megaswift/trainers/rl/source.py.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from megaswift import distributed
from megaswift.data.batches.epoch_order import EpochOrder
from megaswift.data.prompts.source import Prompt, PromptSource
from megaswift.rollout.sampler import Completion
from megaswift.rollout.server_client import SamplingServer
from megaswift.trainers.rl.draw_queue import DrawQueue
from megaswift.trainers.rl.scheduler import CompletionSamplingScheduler
from tests.loopback_http import serve_loopback
from tests.trainers.rl import test_draw_queue
from tests.trainers.rl.makers import Prompts, source
from tests.trainers.rl.test_draw_queue import World, scheduler, timed


def least_idle_share(seconds: Sequence[float], steps: Sequence[float], most: int, parallel: bool = False) -> float:
    """The share of its time that a trainer waits at least, with one step on each generation.

    The sampler draws one generation after the other, in `seconds` each; a step takes `steps`. Draw g begins when draw
    g - 1 has ended, with `parallel` when the first one has, and not before the weights exist that are `most` steps old
    at step g.
    """
    begins: list[float] = []
    ended = 0.0
    for number, needed in enumerate(seconds):
        free = begins[-1] + steps[number - 1] if begins else 0.0
        weights = free if not most else begins[number - most] if number >= most else 0.0
        idle = begins[0] if parallel and begins else ended
        ended = max(idle, weights) + needed
        begins.append(max(ended, free))
    return 1 - sum(steps) / (begins[-1] + steps[-1])


class Known(World):
    """A sampler whose draws take known times."""

    def __init__(self, seconds: Sequence[float], interrupts: bool, parallel: bool = False) -> None:
        super().__init__(random.Random(0), 0.0, interrupts, parallel)
        self.late = 0.0
        self.known = seconds
        self.number = 0

    def submit(self, work: Any) -> Any:
        """The time of the draw's number."""
        self.number = work.args[0]
        return super().submit(work)

    def gather(self, work: Any) -> Any:
        """The same, for a draw in the trainer's own time."""
        self.number = getattr(work, "args", [self.number])[0]
        return super().gather(work)

    def seconds(self) -> float:
        """Draws that no generation takes last for no time."""
        return self.known[self.number] if self.number < len(self.known) else 1e-9


def idle_share(
    seconds: Sequence[float], most: int, interrupts: bool, parallel: bool = False, overtakes: bool = False
) -> float:
    """Of a trainer whose step takes one second, in virtual time."""
    world = Known(seconds, interrupts, parallel)
    made = scheduler(world, most, 1, overtakes)
    waited = 0.0
    for number in range(200):
        asked = world.clock
        made.draw(number, timed)
        waited += world.clock - asked
        made.begin_ahead(number, number + 1, timed)
        world.clock += 1
        world.step += 1
    return waited / world.clock


@pytest.mark.wide
@pytest.mark.parametrize(
    ("most", "interrupts", "parallel", "times", "more"),
    [
        *((most, most > 1, False, 1.1, 0.005) for most in (0, 1, 2, 3, 8)),
        *((most, True, True, 1.1, 0.005) for most in (2, 8)),
        *((most, False, False, 1.0, 0.061) for most in (2, 4, 8)),
        *((most, False, True, 1.0, 0.35) for most in (2, 4, 8)),
    ],
)
def test_the_trainer_waits_no_longer_than_it_must(
    most: int, interrupts: bool, parallel: bool, times: float, more: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a tenth of the least share, or half a percent of the time: draws that are shorter and longer than steps,
    equal and very unequal ones. With more than a generation of staleness, new weights interrupt completions; where they
    may not, the trainer waits longer, by up to 6.1% of the time, and by up to 35% where a sampler works on several
    draws at once."""
    monkeypatch.setattr(distributed, "all_max", lambda values: [float(value) for value in values])
    monkeypatch.setattr(test_draw_queue, "TOKENS", 1000)
    for mean, spread in itertools.product((0.5, 0.95, 1.2, 4.0), (0.0, 0.3, 0.8, 1.5)):
        chance = random.Random(1)
        seconds = [mean * chance.lognormvariate(-spread * spread / 2, spread) for _ in range(200)]
        least = least_idle_share(seconds, [1.0] * 200, most, parallel)
        found = idle_share(seconds, most, interrupts, parallel)
        assert least - 1e-6 <= found <= times * least + more, (mean, spread, least, found)


@pytest.mark.wide
@pytest.mark.parametrize(("interrupts", "falls"), [(False, 0.9), (True, 0.2)])
def test_draws_that_overtake_others_keep_the_trainer_busy(
    interrupts: bool, falls: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that works on all draws of the queue: with very unequal draws, of which some are dropped where
    completions are interrupted, the trainer waits much less than in order, and with others hardly longer."""
    monkeypatch.setattr(distributed, "all_max", lambda values: [float(value) for value in values])
    monkeypatch.setattr(test_draw_queue, "TOKENS", 1000)
    for most, mean, spread in itertools.product((2, 8), (1.0, 4.0), (0.3, 1.5)):
        chance = random.Random(1)
        seconds = [mean * chance.lognormvariate(-spread * spread / 2, spread) for _ in range(400)]
        wait, drop = (idle_share(seconds, most, interrupts, True, overtakes) for overtakes in (False, True))
        assert drop <= 1.1 * wait + 0.005, (most, mean, spread, wait, drop)
        if (most, spread) == (8, 1.5):
            assert drop <= falls * wait and wait > 0.02, (mean, wait, drop)


@pytest.mark.wide
def test_a_server_that_answers_late() -> None:
    """Threads, HTTP and a real clock: the server sleeps by a known schedule, the trainer for 0.2 s a step. The least
    share is that of the times which answers and steps then took."""
    chance = random.Random(3)
    schedule = iter([0.2 * chance.choice([0.5, 1.0, 2.5]) for _ in range(14)])
    answers: list[float] = []
    steps: list[float] = []
    waits: list[float] = []

    class Late(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(next(schedule, 0.0))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    def asked() -> None:
        began = time.perf_counter()
        server.post("/v1/completions")
        answers.append(time.perf_counter() - began)

    with serve_loopback(Late) as url:
        server = SamplingServer(url, 30, "vLLM", "vllm serve")
        made = source(max_staleness=1)
        samples: Any = made.parts.scheduler.generation
        samples.until = asked
        made.next()  # what a process does once
        (first,) = made.parts.scheduler.under_way.values()
        first.share()
        for _ in range(12):
            began = time.perf_counter()
            made.next()
            time.sleep(0.2)
            waits.append(made.seconds["generation"])
            steps.append(time.perf_counter() - began - waits[-1])
        made.parts.scheduler.settle()
    least = least_idle_share([0.0, *answers[2:13]], steps, 1)
    found = sum(waits) / (sum(waits) + sum(steps))
    assert least > 0.1 and abs(found - least) <= 0.1 * least, (least, found)


class Pieces:
    """In the place of a run's `CompletionGenerator`: asks a server for one token at a time, until it has as many as the
    schedule says or is stopped."""

    sampler = None
    engine = None

    def __init__(self, server: SamplingServer, needed: Sequence[int]) -> None:
        self.server = server
        self.needed = needed
        self.seconds = [0.0] * len(needed)
        """What the server took for each draw."""

    def synchronize(self) -> None:
        """The server has no weights."""

    def write_share(
        self,
        prompts: Sequence[Prompt],
        number: int,
        greedy_every: int = 0,
        begun: Sequence[Completion] = (),
        stop: Callable[[], bool] | None = None,
    ) -> list[Completion]:
        """The first completion has the draw's tokens, the others have none."""
        first = begun[0] if begun else Completion((), (), False)
        while len(first.token_ids) < self.needed[number] and not (stop and stop()):
            began = time.perf_counter()
            self.server.post("/v1/completions")
            self.seconds[number] += time.perf_counter() - began
            tokens = (*first.token_ids, number)
            first = replace(first, token_ids=tokens, logprobs=(0.0,) * len(tokens))
        return [first, *[Completion((), (), True)] * (len(prompts) - 1)]

    @staticmethod
    def gather(work: Callable[[], list[Completion]]) -> list[Completion]:
        """There is no other rank."""
        return work()


@pytest.mark.slow
@pytest.mark.parametrize("most", [2, 4])
def test_a_server_that_answers_late_and_is_interrupted(most: int) -> None:
    """Threads, HTTP and a real clock: the server sleeps 5 ms for each token, and works on all draws of the queue. Every
    step of 0.2 s interrupts it."""
    chance = random.Random(4)
    needed = [chance.choice([20, 80, 200]) for _ in range(24 + most)]
    waits: list[float] = []
    steps: list[float] = []

    class Late(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(0.005)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with serve_loopback(Late) as url:
        pieces = Pieces(SamplingServer(url, 30, "vLLM", "vllm serve"), needed)
        prompts: Any = Prompts()
        samples: Any = pieces
        drawn = PromptSource(prompts, 2, EpochOrder(len(prompts), False, 0))
        made = CompletionSamplingScheduler(drawn, samples, 1, DrawQueue(most, 1, True, last=24), at_once=most + 1)
        for number in range(24):
            began = time.perf_counter()
            _, draw = made.draw(number, timed)
            waits.append(time.perf_counter() - began)
            assert draw.completions is not None and len(draw.completions[0].token_ids) == needed[number]
            made.begin_ahead(number, number + 1, timed)
            time.sleep(0.2)
            steps.append(time.perf_counter() - began - waits[-1])
        made.close()
    least = least_idle_share(pieces.seconds[:24], steps, most, parallel=True)
    found = sum(waits) / (sum(waits) + sum(steps))
    assert least > 0.1 and abs(found - least) <= 0.1 * least, (least, found)
