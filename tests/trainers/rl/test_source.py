"""The steps of a policy without an engine: what a generation is, how long it lasts, what of it goes into a
checkpoint.

Covers: megaswift/trainers/rl/scheduler.py.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megaswift.errors import CheckpointError, Problem, RewardError
from megaswift.trainers.rl.evaluation import RewardEvaluationHook
from megaswift.trainers.rl.generation import completion_seeds
from megaswift.trainers.rl.scheduler import WorkClock
from megaswift.trainers.rl.source import RolloutSource
from tests.losses import trainers
from tests.trainers.rl.makers import source, told

FOUR = {"generation_batch_size": 16, "num_iterations": 2}
"""Two batches of a generation, each twice."""


def asked(made: RolloutSource) -> list[int]:
    """Generations that were sampled, and weights that were brought for them."""
    samples: Any = made.parts.scheduler.generation
    return [*samples.asked, samples.synchronized]


def test_every_completion_is_trained_on_once_a_pass() -> None:
    made = source(**FOUR)
    steps = [made.next() for _ in range(5)]
    assert asked(made) == [0, 1, 2]
    numbers = [[n for b in step for n in b.sample_ids.tolist()] for step in steps]
    assert sorted(numbers[0] + numbers[1]) == [*range(16)] and [len(n) for n in numbers] == [8] * 5
    assert [told(s) for s in steps[2:4]] == [told(s) for s in steps[:2]] and told(steps[4]) != told(steps[0])
    assert numbers[0] + numbers[1] != [*range(16)], "mixed, so that prompts do not stay together"
    assert [len(step) for step in steps] == [4] * 5


def test_fields_are_those_that_the_loss_reads() -> None:
    on_policy, off, pulled = source(), source(**FOUR), source(beta=0.1, **FOUR)
    names = [{n for b in made.next() for n in b.fields} for made in (on_policy, off, pulled)]
    assert names == [
        {"completions", "sampled", "advantages"},
        {"completions", "sampled", "advantages", "old"},
        {"completions", "sampled", "advantages", "old", "reference"},
    ]
    for batch in pulled.next():
        at = batch.loss_weights != 0
        for name, factor in (("old", -0.01), ("reference", -0.02)):
            torch.testing.assert_close(batch.fields[name], torch.where(at, factor * batch.labels, 0.0))


def test_fresh_completions_are_told_once() -> None:
    made = source(**FOUR)
    fresh = []
    for _ in range(5):
        made.next()
        fresh.append(len(made.fresh))
    assert fresh == [16, 0, 0, 0, 16]
    assert made.step_extras().metrics["completions/mean_length"] == pytest.approx(
        sum(2 + i % 3 for i in range(16)) / 16
    )


@pytest.mark.wide
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beta": 0.1},
        {"mask_truncated_completions": True},
        {"top_entropy_quantile": 0.5},
        {"loss_type": "clip_cov", "clip_cov_ratio": 0.2, "clip_cov_lb": -9.0, "clip_cov_ub": 9.0},
        {"loss_type": "kl_cov", "use_rollout_logprobs": True, "beta": 0.1},
        {"advantage_estimator": "rloo", "beta": 0.1, "kl_controller": "adaptive"},
        {"advantage_estimator": "remax"},
    ],
    ids=str,
)
@pytest.mark.parametrize("taken", [0, 1, 3, 4, 5])
def test_a_source_goes_on_where_it_was(taken: int, options: dict[str, Any]) -> None:
    """Through JSON, at the end of a generation and within one."""
    first, second = source(**FOUR, **options), source(**FOUR, **options)
    for _ in range(taken):
        first.next()
    state = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(state)
    assert json.loads(json.dumps(second.state_dict())) == state
    for _ in range(4):
        assert told(first.next()) == told(second.next()) and timeless(first) == timeless(second)
    assert (len(state["completed"]) == 0) == (taken in (0, 4))


@pytest.mark.wide
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_generation": True},
        {"beta": 0.1, "kl_in_reward": True, "kl_controller": "adaptive"},
        {"advantage_estimator": "remax", "async_generation": True},
    ],
)
@pytest.mark.parametrize("taken", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("further", [1, 4])
def test_a_source_goes_back(further: int, taken: int, options: dict[str, Any]) -> None:
    """As after a row that another rank cannot use."""
    whole, made = source(**FOUR, **options), source(**FOUR, **options)
    for _ in range(taken):
        assert told(whole.next()) == told(made.next())
    back = made.mark()
    for _ in range(further):
        made.next()
    back()
    assert json.dumps(made.state_dict()) == json.dumps(whole.state_dict())
    for _ in range(6):
        assert told(whole.next()) == told(made.next())


@pytest.mark.parametrize("options", [{}, {"async_generation": True}, {"max_staleness": 8}], ids=str)
def test_a_run_that_sampling_ends_can_be_saved(options: dict[str, Any]) -> None:
    """Nothing is sampled again on the way back, and a resumed run has the completions of a run without the error."""
    whole, made, resumed = (source(**FOUR, **options) for _ in range(3))
    for _ in range(4):
        whole.next()
        made.next()
    samples: Any = made.parts.scheduler.generation
    made.parts.scheduler.settle()
    calls = []

    def fails(*arguments: Any) -> None:
        calls.append(arguments)
        raise RewardError(Problem("--environment w.py:W", "step failed"))

    samples.write = fails
    with pytest.raises(RewardError, match="step failed"):
        for _ in range(9):
            back = made.mark()
            made.next()
            assert told(whole.next())
    sampled = len(calls)
    back()
    resumed.load_state_dict(json.loads(json.dumps(made.state_dict())))
    assert len(calls) == sampled
    for _ in range(6):
        assert told(whole.next()) == told(resumed.next())


def test_a_sampler_that_fails_when_it_is_interrupted() -> None:
    """The other draws, which have stopped within their completions, are not saved as if they were complete."""
    made = source(max_staleness=12, **FOUR)
    scheduler = made.parts.scheduler
    scheduler.queue.interrupts = True
    scheduler._threads = ThreadPoolExecutor(3)
    samples: Any = scheduler.generation
    sampled, stopped = samples.write, []

    def stops(prompts: Any, number: int, *arguments: Any) -> Any:
        if number < 2:
            return sampled(prompts, number)
        deadline = time.monotonic() + 5
        while not scheduler._stop.is_set() and time.monotonic() < deadline:
            time.sleep(0.01)
        stopped.append(number)
        if number == 3:
            raise RewardError(Problem("the server", "is gone"))
        return sampled(prompts, number)[:1]

    samples.write = stops
    for _ in range(4):
        made.next()
    with pytest.raises(RewardError, match="the server: is gone"):
        made.next()
    assert sorted(stopped) == [2, 3] and made.state_dict()["queue"]["draws"] == []


def test_a_run_that_ends_does_not_wait_for_completions_that_stop() -> None:
    made = source(max_staleness=8, **FOUR)
    scheduler = made.parts.scheduler
    scheduler.queue.interrupts = True
    samples: Any = scheduler.generation
    waited: list[bool] = []

    def share(prompts: Any, number: int, every: int, begun: Any, stop: Any) -> Any:
        deadline = time.monotonic() + 5 * (number > 0)
        while not stop() and time.monotonic() < deadline:
            time.sleep(0.01)
        waited.append(not stop())
        return samples.write(prompts, number)

    samples.write_share = share
    made.next()
    scheduler.close()
    assert waited[0] and waited[1:] in ([False], [])


def test_a_generation_after_an_evaluation_gets_the_present_weights(tmp_path: Path) -> None:
    """Also where the run has taken more steps than the source: it was resumed with ignore_data_skip."""
    made = source(**FOUR)
    scheduler = made.parts.scheduler
    run: Any = SimpleNamespace(emit=lambda *_: None, total_steps=99)
    prompts = [scheduler.prompts.prompts.read(i) for i in range(2)]
    hook = RewardEvaluationHook(tmp_path / "eval.jsonl", prompts, (scheduler, made.parts.scorer), 2)
    samples: Any = scheduler.generation
    for step in (1, 2, 3, 4):
        made.next()
        if step == 2:
            record: Any = SimpleNamespace(number=4, epoch=0.0)
            hook.evaluate(run, record)
    assert samples.synchronized == 2
    made.next()
    assert samples.synchronized == 3


def test_a_draw_that_is_under_way_stays_so() -> None:
    """A step takes no longer because the next generation is being sampled."""
    made, free = source(async_generation=True, **FOUR), threading.Event()
    samples: Any = made.parts.scheduler.generation
    samples.until = lambda: samples.asked and free.wait(30)  # from the second draw on
    for _ in range(4):
        made.mark()
        made.next()
    (ahead,) = made.parts.scheduler.under_way.values()
    assert not ahead.present()
    free.set()
    made.next()
    assert samples.asked[:2] == [0, 1] and made.step_extras().metrics["sampling/staleness"] == 4


class AtOnce:
    """In the place of the sampler's thread: every draw has ended when it is asked for."""

    def submit(self, work: Any) -> Any:
        """The completions."""
        found = work()
        return SimpleNamespace(result=lambda: found, done=lambda: True)


def queued(most: int) -> RolloutSource:
    """A source with a queue of several generations, of a sampler that is never late."""
    made = source(max_staleness=most, **FOUR)
    thread: Any = AtOnce()
    made.parts.scheduler._threads = thread
    return made


def test_the_sampler_s_thread_has_the_device_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread would begin on the first device."""
    chosen: list[tuple[int, str]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((device, threading.current_thread().name))
    )
    made = source(async_generation=True, **FOUR)
    made.next()
    made.parts.scheduler.settle()
    assert chosen == [(3, "sampler_0")]


def test_draws_are_written_side_by_side() -> None:
    """By a sampler that writes two at a time: each waits until the other is under way. The order of use is the same."""
    made, plain = source(max_staleness=8, **FOUR), source(**FOUR)
    made.parts.scheduler._threads = ThreadPoolExecutor(2)
    samples: Any = made.parts.scheduler.generation
    both, calls = threading.Barrier(2), itertools.count()
    samples.until = lambda: next(calls) in (1, 2) and both.wait(30)
    for _ in range(12):
        made.next()
        plain.next()
        assert [r.prompt.number for r, _ in made.fresh] == [r.prompt.number for r, _ in plain.fresh]
        assert [r.completion.token_ids for r, _ in made.fresh] == [r.completion.token_ids for r, _ in plain.fresh]
    made.parts.scheduler.settle()
    assert next(calls) > 3 and not both.broken


class Seconds:
    """A clock that tests put forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def pass_(self, seconds: float) -> None:
        """Put it forward."""
        self.now += seconds


def test_time_of_workers_that_overlap_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, clock = Seconds(monkeypatch), WorkClock()
    with ExitStack() as first:
        first.enter_context(clock.working())
        seconds.pass_(1)
        with clock.working():
            seconds.pass_(2)
            assert clock.seconds() == 3
        seconds.pass_(4)
    seconds.pass_(50)
    assert clock.seconds() == 7


@pytest.mark.parametrize("ahead", [False, True])
def test_idle_shares_of_a_step(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw takes three seconds and a step one. Ahead, draws are written while they are begun: the trainer does not
    wait."""
    seconds = Seconds(monkeypatch)
    made = source(async_generation=ahead)
    thread: Any = AtOnce()
    made.parts.scheduler._threads = thread
    samples: Any = made.parts.scheduler.generation
    samples.until = lambda: seconds.pass_(3)
    for step in range(3):
        made.next()
        seconds.pass_(1)
        metrics = made.step_extras().metrics
        drawn = 6 if ahead and step == 0 else 3
        waited = 0 if ahead and step else 3
        assert metrics["time/trainer_idle_share"] == pytest.approx(waited / (drawn + 1))
        assert metrics["time/sampler_idle_share"] == pytest.approx(1 / (drawn + 1))


@pytest.mark.parametrize("taken", [1, 3, 4, 6, 8, 9])
@pytest.mark.parametrize("most", [3, 4, 9])
def test_a_queue_goes_on_where_it_was(most: int, taken: int) -> None:
    """Draws that wait, their versions and the prompts behind them; a generation takes four steps."""
    first, second = queued(most), queued(most)
    for _ in range(taken):
        first.next()
    state = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(state)
    assert json.loads(json.dumps(second.state_dict())) == state
    waiting = [draw["version"] for draw in state["queue"]["draws"]]
    assert len(waiting) == {3: taken % 4 != 1, 4: 1, 9: 2 + (taken % 4 == 0)}[most]
    for _ in range(9):
        assert told(first.next()) == told(second.next()) and timeless(first) == timeless(second)
    assert min(most, 8) <= first.metrics["sampling/staleness_max"] == first.metrics["sampling/staleness"] <= most
    assert first.metrics["sampling/queue"] == (2 if most == 9 else most == 4)


def test_a_draw_that_is_late_is_overtaken() -> None:
    """The one that is finished is trained on in its place; what is left goes on from a checkpoint."""
    made, resumed = (source(max_staleness=4) for _ in range(2))
    for one in (made, resumed):
        one.parts.scheduler.queue.overtakes = True
    scheduler = made.parts.scheduler
    scheduler._threads = ThreadPoolExecutor(4)
    samples: Any = scheduler.generation
    sampled, free = samples.write, threading.Event()

    def late(prompts: Any, number: int, *arguments: Any) -> Any:
        assert number != 1 or free.wait(30)
        return sampled(prompts, number)

    samples.write = late
    made.next()
    for number in (2, 3):
        scheduler.under_way[number].share()
    drawn = []
    for _ in range(2):
        made.next()
        drawn += [r.prompt.number for r, _ in made.fresh[::2]]
    assert drawn == [*range(8, 16)] and made.metrics["sampling/dropped"] == 0
    free.set()
    state = json.loads(json.dumps(made.state_dict()))
    assert [draw["number"] for draw in state["queue"]["draws"]] == [1, 4] and state["queue"]["trained"] == 3
    resumed.load_state_dict(state)
    samples.write = sampled
    for one in (made, resumed):
        thread: Any = AtOnce()
        one.parts.scheduler._threads = thread
    for _ in range(6):
        assert told(made.next()) == told(resumed.next()) and timeless(made) == timeless(resumed)
        drawn += [r.prompt.number for r, _ in made.fresh[::2]]
    assert sorted(drawn) == [*range(4, 36)] and drawn[8:16] == [4, 5, 6, 7, 16, 17, 18, 19]


def test_a_draw_that_is_too_old_goes_back() -> None:
    """A step that is undone brings back the draw that it dropped, from where its completions had stopped."""
    made = source(max_staleness=2)
    scheduler = made.parts.scheduler
    scheduler.queue.overtakes = scheduler.queue.interrupts = True
    scheduler._threads = ThreadPoolExecutor(3)
    samples: Any = scheduler.generation
    free = threading.Event()

    def share(prompts: Any, number: int, every: int, begun: Any, stop: Any) -> Any:
        deadline = time.monotonic() + 20
        while number == 1 and not free.is_set() and not stop():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        whole = samples.write(prompts, number)
        return [replace(c, token_ids=c.token_ids[:1], logprobs=(-0.5,)) for c in whole] if stop() else whole

    samples.write_share = share
    made.next()
    for overtakes in (2, 3):
        back = made.mark()
        scheduler.under_way[overtakes].share()
        made.next()
        assert [r.prompt.number for r, _ in made.fresh[::2]] == [*range(4 * overtakes, 4 * overtakes + 4)]
    assert 1 not in scheduler.under_way and scheduler.dropped == 1
    assert scheduler.under_way[4].prompts[0].number == 4, "its prompts begin again"
    back()
    assert scheduler.dropped == 0
    free.set()
    scheduler.under_way[1].share()
    made.next()
    assert [r.prompt.number for r, _ in made.fresh[::2]] == [4, 5, 6, 7]
    assert {len(r.completion.token_ids) for r, _ in made.fresh} == {2, 3, 4}


@pytest.mark.parametrize(
    "other",
    [
        {"max_staleness": 4},
        {},
        {"max_staleness": 8, "generation_batch_size": 8},
        {"max_staleness": 8, "num_generations": 4},
    ],
)
def test_draws_that_do_not_fit_are_drawn_again(other: dict[str, int]) -> None:
    """A run that goes on with a smaller bound or generations of another size trains on each prompt once."""
    first, second = queued(8), source(**{**FOUR, **other})
    for _ in range(9):
        first.next()
    state = json.loads(json.dumps(first.state_dict()))
    assert [draw["version"] for draw in state["queue"]["draws"]] == [4, 8]
    second.load_state_dict(state)
    asked = []
    for _ in range(12):
        second.next()
        asked += [r.prompt.number for r, _ in second.fresh[:: other.get("num_generations", 2)]]
        if second.fresh:
            assert second.metrics.get("sampling/staleness_max", 0) <= other.get("max_staleness", 0)
    samples: Any = second.parts.scheduler.generation
    assert asked == [*range(24, 24 + len(asked))] and samples.asked[0] == 3


def test_draws_behind_one_that_failed_are_drawn_again() -> None:
    """Also those that are finished: draws are trained on in their order."""
    made = queued(8)
    made.next()
    first, second = made.parts.scheduler.under_way.values()
    first.failed = True
    state = made.state_dict()["queue"]
    assert second.completions is not None and state["draws"] == []
    assert state["prompts"]["returned"] == [*first.places, *second.places] == [*range(8, 24)]


def test_a_draw_counts_by_its_place_in_the_queue() -> None:
    """The second of two with the same weights is trained on a generation later; a smaller bound leaves it out."""
    first, second = queued(8), source(max_staleness=4, **FOUR)
    first.next()
    state = json.loads(json.dumps(first.state_dict()))
    assert [draw["version"] for draw in state["queue"]["draws"]] == [0, 0]
    second.load_state_dict(state)
    assert [draw.number for draw in second.parts.scheduler.queue.draws] == [1]
    asked = []
    for _ in range(11):
        second.next()
        asked += [r.prompt.number for r, _ in second.fresh[::2]]
    assert asked == [*range(8, 24)] and second.metrics["sampling/staleness_max"] <= 4


@pytest.mark.parametrize(("overtakes", "left"), [(True, [2, 3, 4]), (False, [])])
def test_draws_behind_one_that_is_too_old(overtakes: bool, left: list[int]) -> None:
    """They stay where draws overtake each other; else all are drawn again."""
    made, resumed = (source(max_staleness=4) for _ in range(2))
    made.next()
    state = json.loads(json.dumps(made.state_dict()))
    draws = state["queue"]["draws"]
    assert [draw["number"] for draw in draws] == [1, 2, 3, 4]
    draws[0]["version"] = -9
    scheduler = resumed.parts.scheduler
    scheduler.queue.overtakes = overtakes
    resumed.load_state_dict(state)
    assert [draw.number for draw in scheduler.queue.draws] == left
    again = [place for draw in draws if draw["number"] not in left for place in draw["places"]]
    assert scheduler.prompts.returned == again


def test_dropped_draws_are_counted_once() -> None:
    made = source(max_staleness=4)
    scheduler = made.parts.scheduler
    scheduler.queue.overtakes = True
    scheduler.dropped = 3
    made.next()
    assert made.metrics["sampling/dropped"] == 3 and scheduler.dropped == 0


def test_prompts_that_were_given_back_last_come_first() -> None:
    prompts = source(max_staleness=4).parts.scheduler.prompts
    prompts.give_back([5, 6])
    prompts.give_back([1])
    assert prompts.take() == [1, 5, 6, 0] and prompts.take() == [1, 2, 3, 4]


def test_a_checkpoint_without_a_queue_is_refused() -> None:
    made = source(**FOUR)
    made.next()
    state = made.state_dict()
    del state["queue"]
    with pytest.raises(CheckpointError, match=r"has no queue of draws(.*\n)*.*--ignore_data_skip true") as error:
        source(**FOUR).load_state_dict(state)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    "other",
    [
        {"generation_batch_size": 8, "num_iterations": 2},
        {"generation_batch_size": 16, "num_iterations": 1},
        {"generation_batch_size": 16, "num_iterations": 3},
    ],
)
def test_a_run_may_go_on_with_other_generations(other: dict[str, int]) -> None:
    for taken in (3, 4):
        first, second = source(**FOUR), source(**other)
        for _ in range(taken):
            first.next()
        second.load_state_dict(first.state_dict())
        assert all(len(b.sample_ids) == 2 for _ in range(4) for b in second.next())
        assert asked(second)[0] == 1, "the generation after the first one is the second"


def test_silent_completions_reach_the_loss_without_labels() -> None:
    made = source(
        mask_truncated_completions=True,
        num_iterations=2,
        beta=0.1,
        top_entropy_quantile=0.5,
        per_device_train_batch_size=1,
    )
    silent, names = 0, ("sampled", "advantages", "old", "reference", "keep")
    for batch in made.next():
        assert {*batch.fields} == {"completions", *names} and len(batch.fields["completions"]) == 1
        assert batch.fields["keep"].dtype == torch.bool
        silent += not batch.loss_weights.any()
        assert batch.loss_weights.any() or not any(batch.fields[n].any() for n in names)
    assert silent == 3, "of eight those numbered 0, 3 and 6"


def test_uncertain_tokens_are_trl_s(tmp_path: Path) -> None:
    """The threshold is over all micro-batches of a step."""
    trl: Any = trainers.grpo(tmp_path)
    batches = source(top_entropy_quantile=0.3).next()
    width = max(b.labels.shape[1] for b in batches)

    def wide(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, width - x.shape[1]))

    entropies, mask, kept = (
        torch.cat([wide(x) for x in some])
        for some in (
            [b.labels / 10 for b in batches],
            [b.loss_weights != 0 for b in batches],
            [b.fields["keep"] for b in batches],
        )
    )
    assert torch.equal(kept, trl.get_high_entropy_mask(entropies, mask, 0.7))
    assert 0.2 < float(kept.sum() / mask.sum()) < 0.5


def test_the_sampler_s_log_probabilities_are_those_of_the_old_policy() -> None:
    """-0.5 of every token, as `Samples` has it, also in the first step on a generation, without a pass for them."""
    made = source(use_rollout_logprobs=True)
    scored: list[Any] = []
    made.score_completions = lambda *a: scored.append(a)  # type: ignore[method-assign, assignment, func-returns-value]
    for batch in made.next():
        assert torch.equal(batch.fields["old"], -0.5 * (batch.loss_weights != 0)) and not scored
    assert all("old" not in b.fields for b in source().next())


def test_tokens_of_high_covariance_are_selected_over_the_whole_step() -> None:
    """By hand: log-probabilities are -token / 100, advantages those of the batch; the largest 4 of all tokens."""
    batches = source(loss_type="kl_cov", kl_cov_ratio=0.17).next()
    labeled = [b.loss_weights != 0 for b in batches]
    tokens = [float(t) for b, m in zip(batches, labeled, strict=True) for t in b.labels[m]]
    advantages = [float(a) for b, m in zip(batches, labeled, strict=True) for a in b.fields["advantages"][m]]
    selected = [bool(s) for b, m in zip(batches, labeled, strict=True) for s in b.fields["selected"][m]]
    n = len(tokens)
    means = sum(tokens) / n, sum(advantages) / n
    covariances = [-(t - means[0]) * (a - means[1]) for t, a in zip(tokens, advantages, strict=True)]
    assert sum(selected) == int(0.17 * n) > 1
    assert min(c for c, s in zip(covariances, selected, strict=True) if s) >= max(
        c for c, s in zip(covariances, selected, strict=True) if not s
    )
    assert all(not b.fields["selected"][~m].any() for b, m in zip(batches, labeled, strict=True))


REMAX = {"advantage_estimator": "remax"}


def test_each_prompt_has_a_greedy_completion_as_its_baseline() -> None:
    """It is rewarded, and neither trained on nor counted; `Samples` gives it one token, so its reward is 1."""
    made = source(**REMAX, **FOUR)
    steps = [made.next() for _ in range(2)]
    fresh = [r for r, _ in made.fresh]
    assert sorted(n for step in steps for b in step for n in b.sample_ids.tolist()) == [*range(16)]
    assert all(r.baseline == 1 for r in fresh) and made.metrics["reward_baseline"] == 1
    assert made.metrics["completions/min_length"] == 2, "greedy ones are left out"
    assert all((c.values["advantages"] == len(c.written) - 1).all() for c in made.completed)
    plain = source(**FOUR)
    plain.next()
    assert "reward_baseline" not in plain.metrics


def test_groups_without_spread_are_drawn_again() -> None:
    """Prompts 1 and 4 teach nothing: later prompts come in their place, and the first tries fill what is left."""

    def worth(same: set[str]) -> Any:
        return lambda s: 1.0 if s.prompt in same else float(len(s.token_ids))

    made = source(worth({"Q1", "Q4"}), dynamic_sample=True)
    made.next()
    assert [r.prompt.content for r, _ in made.fresh] == ["Q0", "Q0", "Q2", "Q2", "Q3", "Q3", "Q5", "Q5"]
    assert asked(made) == [0, 1, 1] and made.metrics["frac_reward_zero_std"] == 0
    hopeless = source(worth({f"Q{i}" for i in range(99)} - {"Q6"}), dynamic_sample=True, max_resample_times=2)
    hopeless.next()
    assert [r.prompt.content for r, _ in hopeless.fresh[::2]] == ["Q6", "Q0", "Q1", "Q2"] and asked(hopeless) == [
        0,
        1,
        2,
        1,
    ]
    assert hopeless.metrics["frac_reward_zero_std"] == 0.75
    numbers = [c.number for c in hopeless.completed]
    assert numbers == [*range(8)]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("taken", [1, 2, 3, 5])
def test_sampling_anew_goes_on_where_it_was(taken: int, ahead: bool) -> None:
    """Generations that took one draw, two and three; what was drawn ahead is looked at like any other."""

    def made() -> RolloutSource:
        same = {"Q1", "Q4", "Q9", "Q10", "Q11", "Q12", "Q13"}
        return source(
            lambda s: 1.0 if s.prompt in same else float(len(s.token_ids)), dynamic_sample=True, async_generation=ahead
        )

    first, second = made(), made()
    for _ in range(taken):
        first.next()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for _ in range(4):
        assert told(first.next()) == told(second.next()) and timeless(first) == timeless(second)
        assert [r for r, _ in first.fresh] == [r for r, _ in second.fresh] and first.metrics[
            "frac_reward_zero_std"
        ] == 0
    assert first.generations == second.generations > taken + 4


def test_without_it_groups_stay() -> None:
    made = source(lambda s: 1.0)
    made.next()
    assert [r.prompt.content for r, _ in made.fresh[::2]] == ["Q0", "Q1", "Q2", "Q3"] and asked(made) == [0, 1]
    assert all(not advantages.any() for _, advantages in made.fresh)


def test_seeds_are_of_run_generation_and_number_alone() -> None:
    """Different everywhere, the same whenever asked, and known: a change of them changes every run that goes on."""
    drawn = [completion_seeds(run, generation, 8) for run in (0, 42) for generation in (0, 1)]
    flat = [s for some in drawn for s in some]
    assert len(set(flat)) == 32 and all(0 <= s < 2**63 for s in flat)
    assert completion_seeds(42, 1, 3) == drawn[3][:3]
    assert completion_seeds(42, 0, 1) == [int(np.random.SeedSequence([42, 0, 0]).generate_state(1, np.uint64)[0]) >> 1]


def timeless(source: RolloutSource) -> dict[str, float]:
    """Its metrics without seconds."""
    return {name: value for name, value in source.step_extras().metrics.items() if not name.startswith("time/")}
