"""What the first screen says of rewards, of sampling during training and of a policy's second model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megaswift.engine.protocol import EngineSizeReport
from megaswift.run.policy_task import critic_summary_row, queue_summary_rows, rewards_text
from tests.trainers.rl.makers import config


def test_rewards_on_the_screen() -> None:
    """An environment's turns too, alone or beside functions."""
    both = {"reward_funcs": ["accuracy", "format"], "reward_weights": [1.0, 0.2]}
    assert rewards_text(config(**both)) == "accuracy x 1, format x 0.2"
    talks: dict[str, Any] = {"environment": "env.py:Guess", "max_turns": 2}
    assert rewards_text(config(**both, **talks)) == "accuracy x 1, format x 0.2, turns of env.py:Guess"
    assert rewards_text(config(reward_funcs=[], **talks)) == "turns of env.py:Guess"

    apart = {"environment_placement": "cpu", "environment_workers": 3}
    assert rewards_text(config(reward_funcs=[], **talks, **apart)) == "turns of env.py:Guess, in 3 actors on Ray"
    assert rewards_text(config(**both, replay_rollouts="saved")) == "as recorded in saved"


def test_the_queue_and_the_record_on_the_screen() -> None:
    assert not [*queue_summary_rows(config(), 1)]
    assert [*queue_summary_rows(config(async_generation=True), 2)] == [
        ("queue", "sampling goes on during training, at most 2 steps behind")
    ]
    ahead = {"max_staleness": 4, "sampler_engines": 2}
    assert [*queue_summary_rows(config(**ahead), 4)] == [
        ("queue", "sampling goes on during training, at most 4 steps behind")
    ]
    apart = {**ahead, "partial_rollouts": False, "staleness_strategy": "drop"}
    assert [*queue_summary_rows(config(**apart), 2)] == [
        (
            "queue",
            (
                "sampling goes on during training, at most 4 steps behind; new weights wait until all completions are "
                "written; finished draws come first"
            ),
        )
    ]
    options: dict[str, Any] = {**ahead, "staleness_strategy": "drop", "save_rollouts": "saved"}
    assert [*queue_summary_rows(config(**options), 1)] == [
        (
            "queue",
            (
                "sampling goes on during training, at most 4 steps behind; new weights interrupt completions; finished "
                "draws come first; those that become too old are dropped"
            ),
        ),
        ("rollouts", "written to saved"),
    ]
    assert not [*queue_summary_rows(config(max_staleness=4, replay_rollouts="saved"), 1)]


@pytest.mark.parametrize(
    ("options", "trained", "text"),
    [
        (
            {},
            None,
            (
                "the initial model, with a scalar head: 5,000 parameters, 8.0 KiB more on the largest rank, "
                "learning rate 0.001"
            ),
        ),
        (
            {"critic_model": "judge", "critic_learning_rate": 0.01},
            50,
            (
                "judge, with a scalar head: 5,000 parameters; 50 trained (1.00%), 8.0 KiB more on the largest "
                "rank, learning rate 0.01"
            ),
        ),
    ],
)
def test_the_critic_on_the_screen(options: dict[str, Any], trained: int | None, text: str) -> None:
    """1024 + 3072 + 4096 bytes."""
    sizes = EngineSizeReport(5000, 5000, 1024, 3072, 4096, 4000, parameters_trained=trained)
    critic: Any = SimpleNamespace(report=lambda: sizes)
    found = critic_summary_row(config(task="ppo", num_generations=1, learning_rate=0.001, **options), critic)
    assert list(found) == [("critic", text)]
