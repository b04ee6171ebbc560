"""Environments with Gymnasium's `reset` and `step`.

Covers: megaswift/trainers/rl/environment.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaswift.errors import RewardError
from megaswift.trainers.hooks.metrics import read_lines
from megaswift.trainers.rl.environment import EnvironmentWithNamedErrors
from tests.sources import ROOT
from tests.trainers.inputs import write_model

PACKAGES = os.environ.get("MEGASWIFT_OPENENV", "")
LAKE = '''
import gymnasium

MOVES = ("left", "down", "right", "up")


class Lake(gymnasium.Wrapper):
    """FrozenLake in words: a letter of the answer is the move."""

    def __init__(self):
        super().__init__(gymnasium.make("FrozenLake-v1", is_slippery=False))

    def reset(self, *, seed=None, options=None):
        field, info = super().reset(seed=seed)
        assert options["prompt"] and options["number"] == seed
        return f" Field {field}.", info

    def step(self, answer):
        field, reward, terminated, truncated, info = super().step(len(answer) % 4)
        return f"Field {field}.", 0.1 + float(reward), terminated, truncated, info
'''


class Counts:
    """Gymnasium's methods, without the package."""

    returned: Any = ("two", np.float32(0.5), False, False, {})
    closed = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return f"{seed} {json.dumps(options)}", {}

    def step(self, action: str) -> Any:
        return self.returned

    def close(self) -> None:
        self.closed = True


def made(returned: Any = None) -> tuple[Counts, EnvironmentWithNamedErrors]:
    inner = Counts()
    if returned is not None:
        inner.returned = returned
    return inner, EnvironmentWithNamedErrors("--environment e.py:Counts", inner)  # type: ignore[arg-type]


def test_reset_gets_the_rows_number_as_its_seed_or_a_column() -> None:
    _, environment = made()
    assert environment.reset("asked", {"level": 2}, row=7) == '7 {"prompt": "asked", "level": 2}'
    assert environment.reset("asked", {"seed": 3}, row=7) == '3 {"prompt": "asked", "seed": 3}'


@pytest.mark.parametrize(
    ("returned", "wanted"),
    [
        (("two", np.float32(0.5), False, False, {}), ([{"role": "user", "content": "two"}], 0.5, False)),
        (("", 1, np.bool_(True), False, {}), ([{"role": "user", "content": ""}], 1.0, True)),
        (("", 1, False, True, {}), ([{"role": "user", "content": ""}], 1.0, True)),
        ((None, 1, False, False, {}), ([{"role": "user", "content": ""}], 1.0, False)),
        (
            ([{"role": "tool", "content": "3"}], 0, False, False, {}),
            ([{"role": "tool", "content": "3"}], 0.0, False),
        ),
    ],
)
def test_a_step_of_five_values(returned: Any, wanted: Any) -> None:
    inner, environment = made(returned)
    assert environment.step("text") == wanted
    environment.close()
    assert inner.closed


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ((np.zeros(2), 0.0, False, False, {}), "step returned the messages array"),
        (("two", None, False, False, {}), "step returned the reward None"),
        (("two", 0.0, "no", False, {}), "step returned done as None"),
    ],
)
def test_what_is_none_of_gymnasiums_values(returned: Any, words: str) -> None:
    with pytest.raises(RewardError) as error:
        made(returned)[1].step("text")
    assert words in str(error.value)


def test_an_error_of_close_has_a_name() -> None:
    inner, environment = made()
    inner.close = lambda: 1 / 0  # type: ignore[assignment,method-assign,return-value]
    with pytest.raises(RewardError, match=r"e.py:Counts: close failed\n(.*\n)*.*division by zero"):
        environment.close()


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(not PACKAGES, reason="MEGASWIFT_OPENENV is not set (CONTRIBUTING.md)")
def test_a_wrapped_environment_of_gymnasium_answers_a_run(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    (tmp_path / "lake.py").write_text(LAKE, encoding="utf-8")
    rows = [{"prompt": [{"role": "user", "content": f"{i}+1"}], "number": i} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    command = [sys.executable, "megaswift/grpo.py", "--model", str(tmp_path / "model")]
    command += ["--dataset", str(tmp_path / "rows.jsonl"), "--output_dir", str(tmp_path / "out"), "--max_turns", "3"]
    command += ["--environment", f"{tmp_path / 'lake.py'}:Lake", "--num_generations", "2", "--max_steps", "2"]
    command += ["--max_completion_length", "60", "--max_length", "200", "--torch_dtype", "float32"]
    command += ["--per_device_train_batch_size", "2", "--global_batch_size", "4", "--report_to", "none"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([PACKAGES, str(ROOT)])}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = read_lines(tmp_path / "out" / "completions.jsonl")
    assert len(lines) == 8 and all("Field 0." in json.dumps(line["prompt"]) for line in lines)
    assert any(line["turn_rewards"] and line["turn_rewards"][0] == pytest.approx(0.1) for line in lines)
