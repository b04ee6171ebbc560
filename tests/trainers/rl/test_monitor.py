"""Warnings of generations that teach nothing: after three in a row, once, and again when trouble comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megaswift.trainers.rl.monitor import NoRewardsError, RolloutMonitor
from tests.trainers.rl.makers import Samples, source
from tests.trainers.tiny import tiny_loop

Capture = pytest.CaptureFixture[str]


def told(made: Any, steps: int, capsys: Capture, gaps: Mapping[int, float] | None = None) -> tuple[list[int], str]:
    """At which of the steps something was said, and all of it."""
    alarms, found, text = RolloutMonitor(made), list[int](), ""
    for number in range(1, steps + 1):
        made.next()
        step: Any = SimpleNamespace(
            number=number,
            result=SimpleNamespace(metrics={"sampling/token_mult_prob_error": (gaps or {}).get(number, 1.0)}),
        )
        alarms.on_step(SimpleNamespace(), step)
        said = capsys.readouterr().err
        text += said
        found += [number] * bool(said)
    return found, text


def test_equal_rewards(capsys: Capture) -> None:
    steps, text = told(source(lambda s: 0.5), 7, capsys)
    assert steps == [3] and "up to step 3: all completions of a prompt have the same reward (mean 0.5)" in text
    assert told(source(), 7, capsys) == ([], "")


def test_rewards_that_differ_between_prompts_only(capsys: Capture) -> None:
    """Nothing to compare in a group; where a prompt has one completion, a critic tells them apart."""
    numbers = iter(range(1000))
    assert told(source(lambda s: float(next(numbers) // 2)), 4, capsys)[0] == [3]
    alone = {"reward": 0.5, "reward_std": 0.1, "frac_reward_zero_std": 1.0, "completions/clipped_ratio": 0.0}
    made = SimpleNamespace(
        fresh=[(SimpleNamespace(total=0.0), [0.0])], settings=SimpleNamespace(group=1), metrics=alone, next=lambda: None
    )
    assert told(made, 4, capsys) == ([], "")
    alone["reward_std"] = 0.0
    steps, text = told(made, 4, capsys)
    assert steps == [3] and "all completions have the same reward" in text


def test_completions_that_nothing_judges(capsys: Capture) -> None:
    """None of every function, of one completion in a generation."""
    numbers = iter(range(1000))
    made = source(lambda s: None if (n := next(numbers)) % 8 == 5 else float(n))
    steps, text = told(made, 4, capsys)
    assert steps == [3] and "every reward function returned None for 1 of 8 completions" in text
    assert all(b.fields["advantages"].isfinite().all() for b in made.next())


def test_a_generation_counts_once(capsys: Capture) -> None:
    made = source(lambda s: 0.0, generation_batch_size=16, num_iterations=2)
    assert told(made, 12, capsys)[0] == [9]


def test_trouble_that_went_and_came_back(capsys: Capture) -> None:
    steps, text = told(source(), 12, capsys, dict.fromkeys([1, 2, 4, 5, 6, 7, 9, 10, 11], 1.2))
    assert steps == [6, 11] and "token_mult_prob_error 1.2" in text
    assert told(source(), 12, capsys, dict.fromkeys(range(1, 13), 1.04)) == ([], "")
    assert told(source(async_generation=True), 12, capsys, dict.fromkeys(range(1, 13), 1.2)) == ([], ""), (
        "the policy is another by then"
    )


def test_completions_without_an_end(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Samples.write
    monkeypatch.setattr(
        Samples, "write", lambda self, *asked: [replace(c, finished=False) for c in write(self, *asked)]
    )
    steps, text = told(source(), 4, capsys)
    assert steps == [3] and "cut off at --max_completion_length" in text


def test_a_run_without_any_reward_has_failed(capsys: Capture) -> None:
    """One warning, at the first step; exit code 3 at the end, after a resume too, and not after an interruption."""
    made = source(lambda s: None)
    alarms, loop = RolloutMonitor(made), tiny_loop(2)
    for number in (1, 2):
        made.next()
        step: Any = SimpleNamespace(number=number, result=SimpleNamespace(metrics={}))
        alarms.on_step(loop, step)
    err = capsys.readouterr().err
    assert err.count("returned None") == 1 and "step 1: --reward_funcs worth returned None for all 8 completions" in err
    resumed = RolloutMonitor(made)
    resumed.load_state_dict(alarms.state_dict())
    loop.step = 2
    resumed.on_start(loop)
    for end in (alarms.on_end, resumed.on_end, resumed.check_progress):
        with pytest.raises(
            NoRewardsError, match="--reward_funcs worth: returned None for every completion of all 2 steps"
        ) as e:
            end(loop)
        assert e.value.exit_code == 3
    loop.interrupted = 15
    alarms.on_end(loop)


def test_one_reward_of_the_run_is_enough(capsys: Capture) -> None:
    numbers = iter(range(1000))
    made, loop = source(lambda s: 1.0 if next(numbers) == 3 else None), tiny_loop(2)
    alarms = RolloutMonitor(made)
    for number in (1, 2):
        made.next()
        step: Any = SimpleNamespace(number=number, result=SimpleNamespace(metrics={}))
        alarms.on_step(loop, step)
    loop.step = 2
    alarms.on_end(loop)
    assert "step 2: --reward_funcs worth returned None for all 8" in capsys.readouterr().err
    older = RolloutMonitor(made)  # of a checkpoint that has no counts
    older.on_start(loop)
    older.on_end(loop)
