"""How PPO's critic begins."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from megaswift.bridge.new_head import new_head_weight
from megaswift.config import SwiftConfig
from megaswift.engine.protocol import StepResult
from megaswift.families import load_spec
from megaswift.losses.value import ValueLoss
from megaswift.models.heads import with_scalar_head
from megaswift.models.spec import ModelSpec
from megaswift.run import policy_task
from megaswift.trainers.hooks.step_monitor import TrainingDiverged
from megaswift.trainers.rl import critic
from tests.test_cli import model_folder
from tests.trainers.tiny import tiny_loop


def test_a_new_head_says_next_to_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states have mean square 1, so values have the deviation |head|: far below that of rewards, whatever other
    weights have."""
    asked: list[ModelSpec] = []

    class Loaded:
        """An engine that only loads."""

        def load_hf(self, folder: Path) -> None:
            assert folder == tmp_path

    def make(cfg: SwiftConfig, spec: ModelSpec, folder: Path, context: Any) -> Loaded:
        asked.append(spec)
        return Loaded()

    monkeypatch.setattr(policy_task, "make_engine", make)
    model_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    # of a small model a usual head is small too
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 4096}))
    spec = load_spec(tmp_path)
    context: Any = None
    policy_task.critic_engine(SwiftConfig(task="ppo"), spec, tmp_path, context, fresh=True)
    usual = new_head_weight(with_scalar_head(spec), 1)
    assert float(new_head_weight(asked[0], 1).norm()) == pytest.approx(1 / 64, rel=0.1) and float(usual.norm()) > 1
    assert asked[0].scored and not spec.scored


class Uneven:
    """An engine whose steps of these numbers are skipped."""

    def __init__(self, bad: Iterable[int]) -> None:
        self.bad, self.number = set(bad), 0

    def train_batch(self, microbatches: Any, loss: Any, lr: float) -> StepResult:
        self.number += 1
        return StepResult(1.0, skipped=self.number in self.bad)


@pytest.mark.parametrize(
    "bad, code", [(range(1, 13), "critic: 10 steps"), (range(8, 13), "critic: 5 of 12"), ([3], "")]
)
def test_a_critic_that_learns_nothing_fails_the_run(
    bad: Iterable[int], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its gradients are not finite in steps in which the policy's are."""
    found, loop = critic.CriticTrainer(Uneven(bad), ValueLoss(0.2, 0.1), lambda step, total: 0.1), tiny_loop(12)
    loop.total_steps = loop.step = 12

    def run() -> None:
        for _ in range(12):
            found.prepare(found.engine, [], True)
        found.on_end(loop)

    if code:
        with pytest.raises(TrainingDiverged, match=f"of the {code}") as error:
            run()
        assert error.value.exit_code == 3
    else:
        run()
    err = capsys.readouterr().err
    assert ("step 3 of the critic was skipped" in err) == (3 in bad) and ("steps of the critic were" in err) == (
        not code
    )


def test_the_skipped_steps_of_a_critic_go_on_after_a_resume() -> None:
    """Interrupted after seven of twelve steps, the last three of them skipped; the rest is skipped too."""
    before, loop = (
        critic.CriticTrainer(Uneven(range(5, 8)), ValueLoss(0.2, 0.1), lambda step, total: 0.1),
        tiny_loop(12),
    )
    for _ in range(7):
        before.prepare(before.engine, [], True)
    after = critic.CriticTrainer(Uneven(range(1, 13)), ValueLoss(0.2, 0.1), lambda step, total: 0.1)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    loop.step = 7
    after.on_start(loop)
    for _ in range(5):
        after.prepare(after.engine, [], True)
    loop.step = 12
    for end in (after.on_end, after.check_progress):
        with pytest.raises(
            TrainingDiverged, match="step 12 of the critic: 8 of 12 steps were skipped, among them the last 8"
        ):
            end(loop)
