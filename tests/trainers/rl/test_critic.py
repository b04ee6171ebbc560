"""How PPO's critic begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaswift.bridge.new_head import new_head
from megaswift.config import SwiftConfig
from megaswift.families import load_spec
from megaswift.families.scalar_head import with_score
from megaswift.families.spec import ModelSpec
from megaswift.trainers.rl import critic
from tests.test_cli import model_folder


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

    monkeypatch.setattr(critic, "make_engine", make)
    model_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    # of a small model a usual head is small too
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 4096}))
    spec = load_spec(tmp_path)
    context: Any = None
    critic.critic_engine(SwiftConfig(task="ppo"), spec, tmp_path, context, fresh=True)
    usual = new_head(with_score(spec), 1)
    assert float(new_head(asked[0], 1).norm()) == pytest.approx(1 / 64, rel=0.1) and float(usual.norm()) > 1
    assert asked[0].scored and not spec.scored
