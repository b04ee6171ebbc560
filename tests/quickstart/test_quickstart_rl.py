"""scripts/quickstart_rl.sh: the bundled task of reinforcement learning. The whole script, by GRPO and by PPO, and its
reward."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megaswift.rewards.functions import load_reward_functions
from megaswift.rewards.reward_input import RewardInput
from megaswift.rewards.scoring import BuiltInRewardParameters, score_rewards
from tests.sources import ROOT

QUICK = ROOT / "scripts" / "quickstart"
STEPS = {"grpo": 280, "ppo": 200}


def test_the_reward_is_one_for_the_very_words() -> None:
    (function,) = load_reward_functions(
        [f"{QUICK / 'exact_match_reward.py'}:exact"], BuiltInRewardParameters(max_completion_length=8)
    )
    asked = [{"role": "user", "content": "What is 7 in words?"}]
    judged = [
        RewardInput(asked, [{"role": "assistant", "content": said}], (5,), True, {"response": "seven"})
        for said in ("seven", " seven\n", "seven seven", "Seven", "")
    ]
    assert score_rewards([function], [1.0], judged).total == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_an_unknown_option_or_algorithm_is_named() -> None:
    for arguments, said in (
        (["--algorithm", "dpo"], "grpo or ppo"),
        (["--fast"], "known: --python PYTHON, --output FOLDER"),
    ):
        done = subprocess.run(
            ["bash", "scripts/quickstart_rl.sh", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 2 and said in done.stderr


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_the_whole_script(tmp_path: Path, algorithm: str) -> None:
    """Mean reward from under 0.3 to over 0.8 within the stated steps; held-out questions gain too."""
    out = tmp_path / "out"
    command = ["bash", "scripts/quickstart_rl.sh", "--algorithm", algorithm, "--env", sys.prefix, "--output", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    first, last = (float(x) for x in re.findall(r"mean training reward, [^:]*: ([\d.]+)", done.stdout))
    assert first < 0.3 and last > 0.8, done.stdout[-2000:]
    lines = [json.loads(line) for line in (out / algorithm / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines[-1]["step"] == STEPS[algorithm]
    scores = {
        when: int(share) for when, share in re.findall(r"held-out questions, (before|after): (\d+)%", done.stdout)
    }
    assert scores["after"] > scores["before"], done.stdout[-2000:]
    for name in ("loss.png", "report.html", "completions.jsonl", "hf/config.json"):
        assert (out / algorithm / name).stat().st_size > 0, name
