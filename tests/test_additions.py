"""The recipes of CONTRIBUTING.md: an option, a loss, an estimator, a reward function, a family with a new activation, a
tracker and a launcher are each added to a copy of the package by a few lines, and then accepted, listed, refused with
the wrong options and run.

Covers: megaswift/losses/options/loss_table.py, megaswift/losses/options/required_values.py,
megaswift/losses/options/estimator_table.py, megaswift/launchers/options/launchers.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import megaswift
from tests.sources import ROOT

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

    def write(self, path: str, text: str) -> None:
        """Adds a file."""
        (self.root / "megaswift" / path).write_text(text, encoding="utf-8")
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


def test_an_option_takes_two_source_files(package: Copy) -> None:
    """The file of its declaration and the one that reads it."""
    package.insert(
        "trainers/options/schedule.py",
        "wsd_decay_ratio: float",
        "    lr_share: float = option(\n"
        '        0.0, "Least share of the peak rate in polynomial", minimum=0, maximum=1,\n'
        '        only_with={"lr_scheduler_type": "polynomial"},\n'
        "    )\n",
    )
    package.replace(
        "trainers/schedule.py",
        "return float((1 - progress) ** schedule.lr_power)",
        "return max(schedule.lr_share, float((1 - progress) ** schedule.lr_power))",
    )
    told = package.run(
        REFUSED
        + """
import sys
from megaswift.config import SwiftConfig, load_config
from megaswift.config.help import task_help
from megaswift.trainers.schedule import lr_at
polynomial = ("sft", "--lr_scheduler_type", "polynomial", "--learning_rate", "1")
print(refused(*polynomial, "--lr_share", "0.3"))
print(refused("sft", "--lr_share", "0.3"))
print(refused(*polynomial, "--lr_share", "1.5"))
cfg = load_config("sft", [*polynomial[1:], "--lr_share", "0.3"], environ={})
print("lr_share: 0.3" in cfg.to_yaml(), SwiftConfig.from_dict(cfg.to_dict()).schedule.lr_share)
print([round(lr_at(step, 4, cfg.schedule, cfg.optim.learning_rate), 3) for step in range(5)])
print("--lr_share" in task_help("sft", "all", 120), "torch" in sys.modules)
"""
    ).splitlines()
    assert told[0] == "accepted"
    assert "applies only to --lr_scheduler_type polynomial" in told[1] and "must be >= 0 and <= 1" in told[2]
    assert told[3:] == ["True 0.3", "[1.0, 0.75, 0.5, 0.3, 0.3]", "True False"]
    assert len(package.touched) == 2


@pytest.mark.wide
def test_a_loss_with_an_option_of_its_own_takes_three_source_files(package: Copy) -> None:
    """With docs/preference.md and a case in test_dpo.py: five files."""
    package.insert(
        "losses/options/loss_table.py",
        '_entry("kto", "kto"',
        '    _entry("dpo", "cubic", "arXiv:0000.00000", _BELOW_HALF),\n',
    )
    package.replace("losses/options/preference.py", '"aot_unpaired", "simpo"', '"aot_unpaired", "cubic", "simpo"')
    package.insert(
        "losses/options/preference.py",
        "discopop_tau: float",
        '    cubic_power: int = option(3, "Power", minimum=1, tasks=("dpo",), only_with={"loss_type": "cubic"})\n',
    )
    package.insert("losses/dpo_loss_types.py", "discopop_tau: float", "    cubic_power: int = 3\n")
    package.insert(
        "losses/dpo_loss_types.py",
        "LOSS_TYPES: dict",
        "def _cubic(x: PairLogprobsAndRatios) -> Tensor:\n"
        '    """By hand: (1 - margin)^3, smoothed."""\n'
        "    return (1 - x.settings.label_smoothing) * (1 - x.margin) ** x.settings.cubic_power\n\n\n",
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
print(refused("dpo", "--cubic_power", "2"))
page = " ".join(task_help("dpo", "all", 120).split())
print("sigmoid_norm | cubic]" in page, "loss_type sigmoid, exo_pair, robust, aot, aot_unpaired, cubic" in page)
print("torch" in sys.modules)
import torch
from megaswift.config import load_config
from megaswift.losses.contract import Batch, ModelOutputs
from megaswift.run.tasks import TASKS
words = ["--loss_type", "cubic", "--cubic_power", "2", "--label_smoothing", "0.25"]
loss = TASKS.get("dpo").loss(load_config("dpo", words, environ={}))
ids = torch.zeros(2, 3, dtype=torch.long)
rows = torch.arange(3).expand(2, 3)
batch = Batch(ids, ids, torch.ones(2, 3), rows, torch.ones(2, 3, dtype=torch.bool),
              fields={"pairs": torch.tensor([[0, 1]]), "reference": torch.zeros(2, 3)})
x = torch.tensor([[-1.0, -1.0, -1.0], [-2.0, -2.0, -2.0]])
outputs = ModelOutputs(logprobs=x, entropy=x, correct=x, mean_logit=x)
terms, _ = loss(outputs, batch)
print(terms[0].name, round(float(terms[0].sum), 6))
"""
    ).splitlines()
    assert told[0] == "accepted"
    assert "--discopop_tau 0.1" in told[1] and "applies only to --loss_type discopop" in told[1]
    assert "applies only to --loss_type sigmoid, hinge, ipo" in told[2]
    assert "must be < 0.5" in told[3]
    assert "--loss_type cubic" in told[4] and "another task" in told[4]
    assert "applies only to --loss_type cubic" in told[5]
    assert told[6:8] == ["True True", "False"]
    assert told[8] == f"loss/cubic {round(0.75 * 0.7**2, 6)}"  # margin 0.1 x (-3 + 6)
    assert len(package.touched) == 3


@pytest.mark.wide
def test_an_estimator_takes_three_source_files(package: Copy) -> None:
    """One of them declares the option that it reads. With docs/rl_losses.md: four files. Wiring: tests/trainers/rl."""
    package.insert(
        "losses/options/estimator_table.py",
        '        "gae",',
        '        "median", "grpo", "arXiv:0000.00000", kl_in_reward=False\n    ),\n    AdvantageEstimatorEntry(\n',
    )
    package.replace(
        "trainers/rl/options/rl.py",
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
from megaswift.trainers.rl.options.derived import kl_in_reward_of, policy_loss_of
grpo = ("grpo", "--advantage_estimator", "median")
print(refused(*grpo, "--whiten_advantages"))
print(refused(*grpo, "--scale_rewards", "batch"))
print(refused(*grpo, "--gamma", "0.9"))
print(refused(*grpo, "--num_generations", "1"))
print(refused("ppo", "--advantage_estimator", "median"))
cfg = load_config("grpo", [*grpo[1:], "--beta", "0.1", "--num_generations", "3"], environ={})
print(kl_in_reward_of(cfg), policy_loss_of(cfg))
page = " ".join(task_help("grpo", "all", 120).split())
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


@pytest.mark.process
def test_a_reward_function_with_an_option_of_its_own_takes_four_source_files(package: Copy) -> None:
    """Without the option it takes two. With a row in docs/rewards.md and values in test_functions.py: six."""
    package.insert(
        "rewards/options.py",
        "repetition_n_grams: int",
        '    brevity_length: int = option(\n        8, "Length of reward 0", minimum=1, tasks=RL, '
        'only_with={"reward_funcs": "brevity"}\n    )\n',
    )
    package.insert("rewards/scoring.py", "repetition_n_grams: int", "    brevity_length: int = 8\n")
    package.insert(
        "rewards/format_and_length_rewards.py",
        "def answer_format",
        "def brevity(options: BuiltInRewardParameters) -> PerCompletionReward:\n"
        "    longest = options.brevity_length\n"
        '    return PerCompletionReward("brevity", lambda sample: 1 - len(sample.token_ids) / longest)\n\n\n',
    )
    package.insert(
        "rewards/functions.py", "SPELLINGS =", 'NAMED.register("brevity", format_and_length_rewards.brevity)\n'
    )
    told = package.run(
        REFUSED
        + """
import sys
from types import SimpleNamespace
from megaswift.config import load_config
from megaswift.config.help import task_help
grpo = ("grpo", "--reward_funcs", "brevity", "accuracy")
print(refused(*grpo, "--brevity_length", "4"))
print(refused("grpo", "--reward_funcs", "accuracy", "--brevity_length", "4"))
print(refused(*grpo, "--brevity_length", "0"))
print(refused(*grpo, "--repetition_n_grams", "2"))
print("--brevity_length" in task_help("grpo", "all", 120), "torch" in sys.modules)
from megaswift.run.policy_task import reward_functions_of
cfg = load_config("grpo", [*grpo[1:], "--brevity_length", "4"], environ={})
brevity, _ = reward_functions_of(cfg)
print(brevity.name, brevity([SimpleNamespace(token_ids=[1, 2, 3])]))
"""
    ).splitlines()
    assert told[0] == "accepted"
    assert "applies only to --reward_funcs brevity" in told[1] and "must be >= 1" in told[2]
    assert "applies only to --reward_funcs repetition" in told[3]
    assert told[4:] == ["True False", "brevity [0.25]"]
    assert len(package.touched) == 4


def test_a_launcher_takes_three_source_files(package: Copy) -> None:
    """With the option that it reads, and a line in docs: four files."""
    package.insert(
        "launchers/options/launchers.py",
        'LauncherEntry("ray"',
        '    LauncherEntry("echo", "megaswift.launchers.echo", always_starts=True),\n',
    )
    package.replace(
        "launchers/options/launch.py",
        'unit="restarts",\n        only_with={"launcher": "torchrun"}',
        'unit="restarts",\n        only_with={"launcher": ("torchrun", "echo")}',
    )
    package.write(
        "launchers/echo.py",
        '''"""Prints what it would start."""
from megaswift.errors import Problem
class EchoLauncher:
    def missing(self, launch):
        return [Problem("--launcher echo", "needs a terminal", "one")] * (launch.max_restarts > 8)
    def start(self, command, launch, environ):
        print(command.task, *command.words)
        return 7
LAUNCHER = EchoLauncher()
''',
    )
    told = package.run(
        REFUSED
        + """
import sys
from megaswift.config import load_config
from megaswift.config.help import task_help
from megaswift.launchers.options.variables import nested_launcher_problems
from megaswift.launchers.launcher import TrainingCommand, launcher_of
from megaswift.launchers.torchrun_launcher import requests_worker_processes
words = ["--launcher", "echo", "--max_restarts", "2"]
print(refused("sft", *words))
print(refused("sft", *words, "--num_workers", "2"))
print(refused("sft", "--launcher", "echo", "--master_addr", "h"))
print("[torchrun | echo | ray]" in " ".join(task_help("sft", "all", 120).split()), "torch" in sys.modules)
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
    assert len(package.touched) == 3


@pytest.mark.slow
@pytest.mark.process
def test_a_family_with_a_new_activation_takes_two_source_files(package: Copy) -> None:
    """Its file and a row of activations. The oracle is transformers' Qwen3 with its own function of that name."""
    source = (PACKAGE / "families/qwen3.py").read_text(encoding="utf-8")
    for old, new in (
        ('"qwen3"', '"qwen3_relu"'),
        ('"qk_layernorm": True', '"qk_layernorm": True, "activation_func": "relu"'),
        ("config=(FFN,", 'config=(RequiredValue("hidden_act", ("relu",), "the activation of the gated MLP"), FFN,'),
        (
            "from megaswift.models.fields.windows",
            "from megaswift.models.fields.rows import RequiredValue\nfrom megaswift.models.fields.windows",
        ),
    ):
        source = source.replace(old, new)
    package.write("families/qwen3_relu.py", source)
    package.replace("engine/megatron/transformer_config.py", '"silu": F.silu,', '"silu": F.silu, "relu": F.relu,')
    told = package.run(
        f"import sys\nsys.path.append({str(ROOT)!r})\n"
        + """
import json
from pathlib import Path
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from megaswift.commands.training import main
from megaswift.errors import WeightsError
from megaswift.models.family import load_spec
from megaswift.trainers.hooks.metrics import read_lines
from tests.trainers.inputs import write_conversations, write_model

write_model(Path("model"))
data = write_conversations(Path("data.jsonl"), 4)
torch.manual_seed(5)
model = Qwen3ForCausalLM(Qwen3Config.from_pretrained("model", hidden_act="relu"))
for name, weight in model.named_parameters():
    if ".mlp." in name:
        weight.data *= 20  # so that the activation decides about the loss
model.save_pretrained("model")
tokenizer = AutoTokenizer.from_pretrained("model")
total, count = 0.0, 0
for line in data.read_text().splitlines():
    ask, answer = (turn["content"] for turn in json.loads(line)["messages"])
    prompt, end = (tokenizer(text, add_special_tokens=False).input_ids for text in (f"<u>{ask}<e><a>", f"{answer}<e>"))
    loss = model(torch.tensor([prompt + end]), labels=torch.tensor([[-100] * len(prompt) + end])).loss
    total, count = total + loss.item() * len(end), count + len(end)

config = Path("model/config.json")
fields = json.loads(config.read_text())
words = ["--model", "model", "--dataset", "data.jsonl", "--dataset_cache_dir", "cache", "--output_dir", "out",
         "--max_steps", "1", "--global_batch_size", "4", "--engine", "megatron", "--report_to", "none"]
config.write_text(json.dumps(fields | {"model_type": "qwen3_relu", "hidden_act": "silu"}))
try:
    load_spec("model")
except WeightsError as error:
    print(error.problems[0].rule)
config.write_text(json.dumps(fields | {"model_type": "qwen3_relu"}))
print(main("sft", words))
print(total / count, read_lines(Path("out/metrics.jsonl"))[0]["loss"])
"""
    ).splitlines()
    code, losses = told[-2], [float(word) for word in told[-1].split()]
    assert "must be 'relu': the activation of the gated MLP" in told and code == "0"
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert len(package.touched) == 2


@pytest.mark.process
def test_a_tracker_takes_two_source_files(package: Copy) -> None:
    """With an option of its own. The package `echo` stands for the tracker's library."""
    package.replace("trainers/options/tracker.py", '"trackio", "prometheus")', '"trackio", "prometheus", "echo")')
    package.insert(
        "trainers/options/tracker.py",
        "wandb_project: str",
        '    echo_title: str | None = option(None, "Echo: title", only_with={"report_to": "echo"})\n',
    )
    package.insert(
        "trainers/hooks/trackers.py",
        "ONLINE: dict",
        '''class Echo(TrackerHook):
    """Lines of a file."""
    def __init__(self, run):
        super().__init__(run.directory)
        self.run = run
    def open(self, step):
        import echo
        return echo.start(self.directory, self.run.places.echo_title, step)
    def send(self, scalars, step):
        self.session.say(step, scalars)
    def end(self):
        self.session.say("end")
''',
    )
    package.replace(
        "trainers/hooks/trackers.py", '"prometheus": Prometheus,', '"prometheus": Prometheus, "echo": Echo,'
    )
    program = (
        REFUSED
        + """
from pathlib import Path
from types import SimpleNamespace
from megaswift.config import load_config
from megaswift.config.help import task_help
from megaswift.run.checks.preflight import tracker_problems
from megaswift.trainers.hooks.trackers import TrackedRun, tracker_hooks
words = ["--report_to", "echo", "--echo_title", "a"]
print(refused("sft", *words), *(p.rule for p in tracker_problems(("echo",))))
print(refused("sft", "--echo_title", "a"))
print("prometheus | echo]" in " ".join(task_help("sft", "all", 120).split()))
"""
    )
    told = package.run(program).splitlines()
    assert told[0] == "accepted the package echo is not installed"
    assert "applies only to --report_to echo" in told[1] and told[2] == "True"
    (package.root / "echo.py").write_text(
        "from types import SimpleNamespace\n"
        "def start(folder, *words):\n"
        "    def say(*words):\n"
        '        with (folder / "said").open("a") as file:\n'
        "            print(*words, file=file)\n"
        "    say(*words)\n"
        "    return SimpleNamespace(say=say)\n",
        encoding="utf-8",
    )
    told = package.run(
        program
        + """
cfg = load_config("sft", words, environ={})
hooks = tracker_hooks(cfg.trackers.report_to, TrackedRun(Path("."), {}, None, cfg.trackers))
run = SimpleNamespace(step=3)
for hook in hooks:
    hook.on_start(run)
    hook.on_log(run, {"step": 4, "loss": 2.5})
    hook.on_evaluate(run, {"step": 4, "loss": 3.5})
    hook.close()
print(Path("said").read_text())
"""
    ).splitlines()
    assert told[0] == "accepted"
    assert told[3:7] == ["a 3", "4 {'train/loss': 2.5}", "4 {'eval/loss': 3.5}", "end"]
    assert len(package.touched) == 2
