"""Conversations that advance on their own: a slow environment holds no other, and leaves no trace in the tokens.

Covers: megaswift/trainers/rl/waves.py, megaswift/trainers/rl/environment.py.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from megaswift.data.prompts.source import Prompt
from megaswift.errors import Problem, RewardError
from megaswift.rollout.sampler import Completion, SamplerOptions, SamplingParams, make_sampler
from megaswift.trainers.rl import environment, environment_workers, waves
from megaswift.trainers.rl.chat_turns import ChatTurns
from megaswift.trainers.rl.environment import EnvironmentWithNamedErrors
from megaswift.trainers.rl.environment_workers import EnvironmentWorkers
from megaswift.trainers.rl.multi_turn import MultiTurnCompletion, MultiTurnRunner
from tests.data import makers
from tests.trainers.inputs import write_model
from tests.trainers.rl.test_environment_workers import loaded

MANY, TURNS = 32, 8
SLOW_ROW = 7
WAIT = 60.0
"""Seconds until a test fails that would wait for ever."""


class Counts:
    """A sampler that takes `seconds` a call; its tokens are made of the last token before them and the seed."""

    def __init__(self, tokenizer: Any, seconds: float = 0.0) -> None:
        self.end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.seconds = seconds
        self.calls: list[int] = []
        """Prompts of each call."""
        self.threads: set[int] = set()

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        self.calls.append(len(prompts))
        self.threads.add(threading.get_ident())
        time.sleep(self.seconds)
        return [self.one(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]

    def one(self, prompt: Sequence[int], seed: int) -> Completion:
        draws = np.random.default_rng([seed, len(prompt)])
        tokens = (*draws.integers(20, 90, draws.integers(1, 9)).tolist(), self.end)
        return Completion(tokens, tuple((-draws.random(len(tokens))).tolist()), True)


class CountsSingle(Counts):
    """The same, one prompt at a time."""

    def generate_one(self, prompt: Sequence[int], sampling: SamplingParams, seed: int, number: int) -> Completion:
        return self.generate([prompt], sampling, [seed])[0]


class World:
    """A conversation of `TURNS` turns. Row `SLOW_ROW` waits in its third step."""

    wait: Callable[[], object] = staticmethod(lambda: None)
    ends: dict[int, float] = {}  # noqa: RUF012
    """When each row ended."""
    last = threading.Event()
    """All rows but the slow one have ended."""

    def reset(self, prompt: Any, row: int, **columns: Any) -> None:
        self.row, self.turn, self.thread = row, 0, threading.get_ident()

    def step(self, answer: str) -> Any:
        assert threading.get_ident() == self.thread, "the calls of a conversation are made in one thread"
        if self.row == SLOW_ROW and self.turn == 2:
            type(self).wait()
        return self.answer(answer)

    def answer(self, answer: str) -> Any:
        self.turn += 1
        if self.turn == TURNS:
            self.ends[self.row] = time.monotonic()
            if len({*self.ends} - {SLOW_ROW}) == MANY - 1:
                self.last.set()
        return [{"role": "user", "content": f"{self.row}.{self.turn}"}], len(answer) / 8, self.turn == TURNS


class AsyncWorld(World):
    """The same, awaited."""

    loops: set[int] = set()  # noqa: RUF012

    async def reset(self, prompt: Any, row: int, **columns: Any) -> None:  # type: ignore[override]
        super().reset(prompt, row, **columns)

    async def step(self, answer: str) -> Any:
        self.loops.add(id(asyncio.get_running_loop()))
        if self.row == SLOW_ROW and self.turn == 2:
            await asyncio.to_thread(type(self).wait)
        return self.answer(answer)


@pytest.fixture(params=[World, AsyncWorld], ids=["def", "async def"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[World]:
    made: type[World] = request.param
    monkeypatch.setattr(made, "ends", {})
    monkeypatch.setattr(made, "last", threading.Event())
    return made


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return makers.tokenizer("qwen", "qwen2_5")


def talked(
    tokenizer: Any,
    sampler: Any,
    made: Callable[[], Any],
    count: int = MANY,
    greedy: Collection[int] = (),
    workers: EnvironmentWorkers | None = None,
) -> list[MultiTurnCompletion]:
    said = ({"role": "user", "content": "go"},)
    ids = tuple(tokenizer.apply_chat_template(list(said), add_generation_prompt=True, return_dict=False))
    make = workers.make if workers else lambda: EnvironmentWithNamedErrors("--environment w.py:W", made())
    runner = MultiTurnRunner(make, ChatTurns(tokenizer), None)
    prompts = [Prompt(row, ids, said, {"row": row}) for row in range(count)]
    sampling = SamplingParams(2000, stop_token_ids=(sampler.end,))
    found = runner.write(sampler, sampling, prompts, range(50, 50 + count), greedy)
    return [talk for talk in found if isinstance(talk, MultiTurnCompletion)]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("kind", "count"), [(Counts, 0), (CountsSingle, 0), (CountsSingle, 1)], ids=["waves", "single", "worker"]
)
def test_an_environment_that_waits_for_all_others_to_end(
    kind: type[Counts], count: int, world: type[World], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for ever if any of them waited for it; the conversations are those without it, bit by bit. So too
    where all are in one worker."""
    usual = kind(tokenizer)
    plain = talked(tokenizer, usual, world)
    if kind is Counts:
        assert usual.calls == [MANY] * TURNS and usual.threads == {threading.get_ident()}
    world.ends.clear()
    world.last.clear()

    def wait() -> None:
        if not world.last.wait(WAIT):
            raise TimeoutError("the others wait for this one")

    monkeypatch.setattr(world, "wait", staticmethod(wait))
    held = kind(tokenizer)
    monkeypatch.setattr("ray.get", lambda reference: reference.result(WAIT))
    monkeypatch.setattr(environment_workers, "load_environment_class", lambda text: world)
    workers = EnvironmentWorkers("flag", [loaded("w.py:W") for _ in range(count)]) if count else None
    assert talked(tokenizer, held, world, workers=workers) == plain
    assert max(world.ends, key=lambda row: world.ends[row]) == SLOW_ROW
    if kind is Counts:
        assert held.calls == [MANY] * 3 + [MANY - 1] * (TURNS - 3) + [1] * (TURNS - 3)
    else:
        assert held.calls == [1] * (MANY * TURNS)
    assert all(talk.turns == TURNS and talk.finished for talk in plain)
    if world is AsyncWorld:
        assert len(AsyncWorld.loops) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Counts, CountsSingle])
def test_a_sleep_of_five_seconds_leaves_the_others_their_time(
    kind: type[Counts], world: type[World], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 1.2 x of it."""
    took = []
    for seconds in (0.0, 5.0):
        monkeypatch.setattr(world, "wait", staticmethod(lambda s=seconds: time.sleep(s)))
        began = time.monotonic()
        talked(tokenizer, kind(tokenizer, 0.15), world)
        ends = sorted(end - began for row, end in world.ends.items() if row != SLOW_ROW)
        took.append((ends[-1], world.ends[SLOW_ROW] - began))
    print(f"others {took[0][0]:.2f} s alone, {took[1][0]:.2f} s beside one that took {took[1][1]:.2f} s")
    assert took[1][0] <= 1.2 * took[0][0] and took[1][1] > 5


@pytest.mark.wide
def test_a_conversation_that_was_late_joins_the_others(
    world: type[World], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It misses some waves of the others, and is in a wave with all of them again."""
    monkeypatch.setattr(world, "wait", staticmethod(lambda: time.sleep(0.5)))
    sampler = Counts(tokenizer, 0.15)
    talked(tokenizer, sampler, world)
    missed = sampler.calls.index(MANY - 1)
    assert missed == 3 and MANY in sampler.calls[missed:] and len(sampler.calls) < TURNS + 6


@pytest.mark.wide
def test_tokens_of_a_model_do_not_depend_on_when_environments_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model")
    sampler: Any = make_sampler("transformers", model, SamplerOptions(dtype="float32"))
    sampler.update_weights(load_file(model / "model.safetensors").items())
    sampler.end = 1
    theirs = AutoTokenizer.from_pretrained(model)
    monkeypatch.setattr(waves, "GRACE", 0.0)
    delays = np.random.default_rng(0)

    class Delays(World):
        def step(self, answer: str) -> Any:
            time.sleep(float(delays.choice([0.0, 0.0, 0.05, 0.2])))
            return self.answer(answer[:4])

    plain = talked(theirs, sampler, World, 8)
    held = talked(theirs, sampler, Delays, 8)
    assert [talk.token_ids for talk in held] == [talk.token_ids for talk in plain]
    for one, other in zip(held, plain, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=5e-6)


def test_conversations_that_begin_together_share_an_event_loop(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where making one takes a moment."""
    make = asyncio.new_event_loop

    def slowly() -> asyncio.AbstractEventLoop:
        time.sleep(0.1)
        return make()

    environment._started_loop.cache_clear()
    monkeypatch.setattr(asyncio, "new_event_loop", slowly)
    monkeypatch.setattr(AsyncWorld, "loops", set())
    talked(tokenizer, Counts(tokenizer), AsyncWorld, 8)
    assert len(AsyncWorld.loops) == 1


@pytest.mark.parametrize("kind", [Counts, CountsSingle])
def test_greedy_conversations_are_led_beside_the_others(kind: type[Counts], tokenizer: Any) -> None:
    """In waves of their own, of the same turns; a wave of the others does not change."""
    temperatures: list[tuple[float, int]] = []

    class Notes(kind):  # type: ignore[misc,valid-type]
        def generate(self, prompts: Any, sampling: SamplingParams, seeds: Any) -> list[Completion]:
            temperatures.append((sampling.temperature, len(prompts)))
            found: list[Completion] = super().generate(prompts, sampling, seeds)
            return found

    plain = talked(tokenizer, kind(tokenizer), World, 6)
    assert talked(tokenizer, Notes(tokenizer), World, 6, greedy={2, 5}) == plain
    sizes = [(1.0, 4), (0.0, 2)] if kind is Counts else [(1.0, 1)] * 4 + [(0.0, 1)] * 2
    assert sorted(temperatures) == sorted(sizes * TURNS)


def test_a_wave_has_the_largest_room() -> None:
    """The conversation near its limit does not shorten the others' turns."""
    rooms: list[int] = []

    class Notes:
        def generate(self, prompts: Any, sampling: SamplingParams, seeds: Any) -> list[Completion]:
            rooms.append(sampling.max_tokens)
            return [Completion((prompt[0],), (-1.0,), True) for prompt in prompts]

    def begin(number: int, ask: waves.Asker) -> waves.Talk[int]:
        completion = yield waves.Ask([number], (4, 9, 6)[number], 0)
        return int(completion.token_ids[0])

    sampler: Any = Notes()
    assert waves.lead_conversations(begin, 3, sampler, SamplingParams(100)) == [0, 1, 2] and rooms == [9]


def test_more_conversations_than_threads(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = talked(tokenizer, Counts(tokenizer), World)
    monkeypatch.setattr(waves, "SEATS", 5)
    few = Counts(tokenizer)
    assert talked(tokenizer, few, World) == plain
    assert max(few.calls) == 5 and sum(few.calls) == MANY * TURNS


def test_an_error_does_not_wait_for_the_others(
    world: type[World], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    class Fails(world):  # type: ignore[misc,valid-type]
        def answer(self, answer: str) -> Any:
            if self.row == 3 and self.turn == 3:
                raise KeyError("nothing here")
            return super().answer(answer)

    monkeypatch.setattr(world, "wait", staticmethod(lambda: release.wait(WAIT)))
    began = time.monotonic()
    with pytest.raises(RewardError, match=r"--environment w.py:W: step failed(.*\n)*.*nothing here"):
        talked(tokenizer, Counts(tokenizer), Fails)
    assert time.monotonic() - began < WAIT / 2
    release.set()


@pytest.mark.wide
def test_environments_are_closed_where_one_fails(
    world: type[World], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each once and in its own thread, the one that fails too; one that never answers holds nobody for long."""
    monkeypatch.setattr(waves, "LEAVING", 0.5)
    closed: list[int] = []
    threads: set[bool] = set()
    release = threading.Event()

    class Fails(world):  # type: ignore[misc,valid-type]
        def answer(self, answer: str) -> Any:
            if self.row == 3 and self.turn == 3:
                raise KeyError("nothing here")
            return super().answer(answer)

        def close(self) -> None:
            closed.append(self.row)
            threads.add(world is AsyncWorld or threading.get_ident() == self.thread)

    monkeypatch.setattr(world, "wait", staticmethod(lambda: release.wait(WAIT)))
    began = time.monotonic()
    with pytest.raises(RewardError, match="nothing here"):
        talked(tokenizer, Counts(tokenizer), Fails, 10)
    assert time.monotonic() - began < WAIT / 2
    assert sorted(closed) == [row for row in range(10) if row != SLOW_ROW] and threads == {True}
    release.set()


def test_threads_end_with_the_conversations(tokenizer: Any) -> None:
    talked(tokenizer, Counts(tokenizer), World)
    deadline = time.monotonic() + WAIT
    while any(thread.name.startswith("conversation ") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_error_of_the_sampler_is_raised(tokenizer: Any) -> None:
    class Fails(CountsSingle):
        def one(self, prompt: Sequence[int], seed: int) -> Completion:
            raise RewardError(Problem("the server", "is gone"))

    with pytest.raises(RewardError, match="the server: is gone"):
        talked(tokenizer, Fails(tokenizer), World)
