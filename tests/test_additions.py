"""What it takes to add a loss, an estimator or a launcher: each is added to a copy of the package by its few lines, and
then accepted, listed, refused with the wrong options and computed.

Covers: megaswift/losses/loss_table.py, megaswift/config/checks/losses.py,
megaswift/losses/estimator_table.py, megaswift/launchers/launcher_table.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import megaswift

PACKAGE = Path(megaswift.__file__).parent


class Copy:
    """A copy of the package that a test adds to."""

    def __init__(self, root: Path) -> None:
        self.root, self.touched = root, set[str]()
        shutil.copytree(PACKAGE, root / "megaswift", ignore=shutil.ignore_patterns("__pycache__"))

    def insert(self, path: str, before: str, text: str) -> None:
        """Puts text in front of the first line that contains `before`."""
        file = self.root / "megaswift" / path
        content = file.read_text(encoding="utf-8")
        start = content.rindex("\n", 0, content.index(before)) + 1
        file.write_text(content[:start] + text + content[start:], encoding="utf-8")
        self.touched.add(path)

    def replace(self, path: str, old: str, new: str) -> None:
        """Replaces the first occurrence of a text."""
        file = self.root / "megaswift" / path
        content = file.read_text(encoding="utf-8")
        assert old in content
        file.write_text(content.replace(old, new, 1), encoding="utf-8")
        self.touched.add(path)

    def run(self, program: str, exit_code: int = 0) -> str:
        """What a program prints that sees only the copy."""
        environ = os.environ | {"PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environ, cwd=self.root, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == exit_code, done.stderr
        return done.stdout


@pytest.fixture
def package(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


REFUSED = """
from megaswift.config import load_config
from megaswift.errors import ConfigError
def refused(*words):
    try:
        load_config(words[0], [*words[1:]], environ={})
    except ConfigError as error:
        return "; ".join(f"{p.what} {p.rule}" for p in error.problems)
    return "accepted"
"""


@pytest.mark.wide
def test_a_preference_loss_takes_three_source_files(package: Copy) -> None:
    """One of them declares the option that it reads. With docs/preference.md and a case in test_dpo.py: five files."""
    package.insert(
        "losses/loss_table.py",
        '_entry("kto", "kto"',
        '    _entry("dpo", "cubic", "arXiv:0000.00000", _BELOW_HALF),\n',
    )
    package.replace("losses/options.py", '"aot_unpaired", "simpo"', '"aot_unpaired", "cubic", "simpo"')
    package.insert(
        "losses/dpo_loss_types.py",
        "LOSS_TYPES: dict",
        "def _cubic(x: PairLogprobsAndRatios) -> Tensor:\n"
        '    """By hand: (1 - margin)^3, smoothed."""\n'
        "    return (1 - x.settings.label_smoothing) * (1 - x.margin) ** 3\n\n\n",
    )
    package.insert("losses/dpo_loss_types.py", '"sigmoid": _sigmoid,', '    "cubic": _cubic,\n')
    told = package.run(
        REFUSED
        + """
import sys
from megaswift.config.help import task_help
print(refused("dpo", "--loss_type", "cubic", "--label_smoothing", "0.1"))
print(refused("dpo", "--loss_type", "cubic", "--discopop_tau", "0.1"))
print(refused("dpo", "--loss_type", "cubic", "--f_divergence_type", "forward_kl"))
print(refused("dpo", "--loss_type", "cubic", "--label_smoothing", "0.6"))
print(refused("cpo", "--loss_type", "cubic"))
page = " ".join(task_help("dpo", 120).split())
print("sigmoid_norm | cubic]" in page, "loss_type sigmoid, exo_pair, robust, aot, aot_unpaired, cubic" in page)
print("torch" in sys.modules)
import torch
from megaswift.losses.contract import Batch, ModelOutputs
from megaswift.losses.dpo import DPO
from megaswift.losses.dpo_loss_types import DpoSettings
ids = torch.zeros(2, 3, dtype=torch.long)
rows = torch.arange(3).expand(2, 3)
batch = Batch(ids, ids, torch.ones(2, 3), rows, torch.ones(2, 3, dtype=torch.bool),
              fields={"pairs": torch.tensor([[0, 1]]), "reference": torch.zeros(2, 3)})
x = torch.tensor([[-1.0, -1.0, -1.0], [-2.0, -2.0, -2.0]])
outputs = ModelOutputs(logprobs=x, entropy=x, correct=x, mean_logit=x)
terms, _ = DPO(("cubic",), settings=DpoSettings(0.1, 0.25))(outputs, batch)
print(terms[0].name, round(float(terms[0].sum), 6))
"""
    ).splitlines()
    assert told[0] == "accepted"
    assert "--discopop_tau 0.1" in told[1] and "applies only to --loss_type discopop" in told[1]
    assert "applies only to --loss_type sigmoid, hinge, ipo" in told[2]
    assert "must be < 0.5" in told[3]
    assert "--loss_type cubic" in told[4] and "another task" in told[4]
    assert told[5:7] == ["True True", "False"]
    assert told[7] == f"loss/cubic {round(0.75 * 0.7**3, 6)}"  # margin 0.1 x (-3 + 6)
    assert len(package.touched) == 3


@pytest.mark.wide
def test_an_estimator_takes_three_source_files(package: Copy) -> None:
    """One of them declares the option that it reads. With docs/rl.md: four files. Wiring: tests/trainers/rl."""
    package.insert(
        "losses/estimator_table.py",
        '        "gae",',
        '        "median", "grpo", "arXiv:0000.00000", kl_in_reward=False\n    ),\n    AdvantageEstimatorEntry(\n',
    )
    package.replace(
        "trainers/rl/options.py",
        '"advantage_estimator": ("rloo", "gae")',
        '"advantage_estimator": ("rloo", "median", "gae")',
    )
    package.insert(
        "losses/advantage_estimators.py",
        "def estimate_advantage_fields",
        '@ESTIMATORS.add("median")\ndef _median(x: EstimatorInput) -> Tensor:\n'
        "    groups = x.rewards.view(-1, x.group)\n"
        "    return (groups - groups.median(1, keepdim=True).values).flatten()\n\n\n",
    )
    told = package.run(
        REFUSED
        + """
import sys
from megaswift.config import load_config
from megaswift.config.help import task_help
from megaswift.config.facts.rl import kl_in_reward_of, policy_loss_of
grpo = ("grpo", "--advantage_estimator", "median")
print(refused(*grpo, "--whiten_advantages"))
print(refused(*grpo, "--scale_rewards", "batch"))
print(refused(*grpo, "--gamma", "0.9"))
print(refused(*grpo, "--num_generations", "1"))
print(refused("ppo", "--advantage_estimator", "median"))
cfg = load_config("grpo", [*grpo[1:], "--beta", "0.1", "--num_generations", "3"], environ={})
print(kl_in_reward_of(cfg), policy_loss_of(cfg))
page = " ".join(task_help("grpo", 120).split())
print("| median]" in page, "advantage_estimator rloo, median" in page, "torch" in sys.modules)
import numpy as np
from megaswift.data.prompts.collate import RolloutTokens
from megaswift.trainers.rl.advantages import AdvantageEstimator
from megaswift.run.policy_task import rl_settings
settings = rl_settings(cfg, 1)
zeros = {name: np.zeros(2, dtype=np.float32) for name in ("old", "sampled")}
tokens = [RolloutTokens(i, [1], [2, 3], [True, True], zeros, False) for i in range(3)]
class Judged:
    by_token = None
    def __init__(self, total):
        self.total, self.rewards = total, {"a": total}
found = AdvantageEstimator(cfg.rl, settings, 0.1)([Judged(v) for v in (1.0, 4.0, 2.0)], tokens)
print([v.tolist() for v in found["advantages"]])
"""
    ).splitlines()
    assert told[0] == "accepted"
    assert "applies only to --advantage_estimator grpo" in told[1]
    assert "applies only to --advantage_estimator reinforce_plus_plus or gae" in told[2]
    assert "compares the completions of a prompt" in told[3] and "median" in told[4]
    assert told[5:7] == ["False dapo", "True True False"]
    assert told[7] == "[[-1.0, -1.0], [2.0, 2.0], [0.0, 0.0]]"
    assert len(package.touched) == 3


def test_a_launcher_takes_three_source_files(package: Copy) -> None:
    """With the option that it reads, and a line in docs: four files."""
    package.insert(
        "launchers/launcher_table.py",
        'LauncherEntry("ray"',
        '    LauncherEntry("echo", "megaswift.launchers.echo", always_starts=True),\n',
    )
    package.replace(
        "launchers/options.py",
        'unit="restarts",\n        only_with={"launcher": "torchrun"}',
        'unit="restarts",\n        only_with={"launcher": ("torchrun", "echo")}',
    )
    (package.root / "megaswift/launchers/echo.py").write_text(
        '''"""Prints what it would start."""
from megaswift.errors import Problem
class EchoLauncher:
    def missing(self, launch):
        return [Problem("--launcher echo", "needs a terminal", "one")] * (launch.max_restarts > 8)
    def start(self, command, launch, environ):
        print(command.task, *command.words)
        return 7
LAUNCHER = EchoLauncher()
'''
    )
    told = package.run(
        REFUSED
        + """
import sys
from megaswift.config import load_config
from megaswift.config.help import task_help
from megaswift.config.facts.launch_variables import nested_launcher_problems
from megaswift.launchers.launcher import TrainingCommand, launcher_of
from megaswift.launchers.torchrun_launcher import requests_worker_processes
words = ["--launcher", "echo", "--max_restarts", "2"]
print(refused("sft", *words))
print(refused("sft", *words, "--num_workers", "2"))
print(refused("sft", "--launcher", "echo", "--master_addr", "h"))
print("[torchrun | echo | ray]" in " ".join(task_help("sft", 120).split()), "torch" in sys.modules)
cfg = load_config("sft", words, environ={})
started = launcher_of(cfg.launch).start(TrainingCommand("sft", words), cfg.launch, {})
print(requests_worker_processes(cfg.launch), started, *nested_launcher_problems("echo", {}))
import megaswift.commands.training as entry
print(entry.main("sft", ["--launcher", "echo", "--max_restarts", "9", "--model", "m", "--dataset", "d"]))
""",
        exit_code=2,
    ).splitlines()
    assert told[0] == "accepted"
    assert "applies only to --launcher ray" in told[1] and "applies only to --launcher torchrun" in told[2]
    assert (
        told[3] == "True False"
        and told[4:6] == ["sft --launcher echo --max_restarts 2", told[5]]
        and told[5].startswith("True 7 --launcher echo: this process was already started")
    )
    assert len(package.touched) == 2
