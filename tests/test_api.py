"""The Python API puts a configuration together; the run itself is the command line's."""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import yaml

from megaswift import SwiftConfig, Trainer, plugins
from megaswift.api import TrainOutput, python_api_launch_option_problems, starts_over
from megaswift.commands.python_launch import RunFailedError
from megaswift.errors import ConfigError, Problem
from megaswift.rewards.functions import load_reward_functions
from megaswift.rewards.reward_input import RewardInput
from megaswift.rewards.scoring import OF_TRL, BuiltInRewardParameters, missing_reward_column_problems
from megaswift.run.checks.rl import reward_environment_and_model_problems
from megaswift.trainers.hook import PLUGIN_HOOKS, Hook
from megaswift.trainers.hooks.metrics import read_lines
from tests.data.makers import chat
from tests.registered_plugins import kept_registrations
from tests.sources import ROOT
from tests.trainers.inputs import write_model


def test_the_design_s_example_is_understood(tmp_path: Path) -> None:
    trainer = Trainer(model=tmp_path, config=SwiftConfig(parallel={"tensor_parallel_size": 4}, dtype="bf16"))
    assert trainer.config.model.model == str(tmp_path) and trainer.config.parallel.tensor_parallel_size == 4
    assert trainer.config.model.torch_dtype == "bfloat16" and trainer.config.task == "sft"


def test_what_is_missing_is_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        Trainer(config=SwiftConfig(task="pt")).train()
    assert [p.what for p in caught.value.problems] == ["model", "dataset"]


def test_options_of_train_are_checked() -> None:
    with pytest.raises(ConfigError, match="nosuch=1: is not an option"):
        Trainer("DIR").train(dataset="d.jsonl", nosuch=1)


def test_launch_options_that_are_not_followed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    trainer = Trainer("NO_SUCH_DIR", SwiftConfig(nproc_per_node=2, nnodes=2, node_rank=0, master_addr="a"))
    with pytest.raises(ConfigError, match="nnodes 2: the Python API does not start processes on other machines"):
        trainer.train("d.jsonl")
    assert (
        python_api_launch_option_problems(SwiftConfig().launch)
        == python_api_launch_option_problems(SwiftConfig(nproc_per_node=1).launch)
        == []
    )
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert python_api_launch_option_problems(trainer.config.launch) == []
    refused = python_api_launch_option_problems(SwiftConfig(nproc_per_node=4).launch)
    assert [p.what for p in refused] == ["--nproc_per_node 4"]


@pytest.mark.process
def test_rows_go_in_and_metrics_come_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of rows, a `datasets.Dataset` to evaluate on; what comes back is what the files hold."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    rows = [chat(f"{i}+1=", str(i + 1)) for i in range(8)]
    options = {"engine": "ddp", "max_steps": 2, "global_batch_size": 4, "output_dir": str(tmp_path / "out")}
    trainer = Trainer(
        write_model(tmp_path / "model"), SwiftConfig(dataset_cache_dir=str(tmp_path / "cache"), **options)
    )
    result = trainer.train(dataset=rows, val_dataset=datasets.Dataset.from_list(rows[:3]))
    assert result.output_dir == tmp_path / "out" and result.global_step == 2
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert result.log_history == lines and result.metrics == lines[-1] and result.metrics["loss"] > 0
    evaluated = json.loads((tmp_path / "out" / "eval.jsonl").read_text().splitlines()[-1])
    assert result.eval_metrics == evaluated and evaluated["step"] == 2
    assert (tmp_path / "out" / "hf" / "config.json").is_file()


@pytest.fixture
def kept() -> Iterator[None]:
    with kept_registrations():
        yield


# ---- functions of a script


def shorter(completions: list[str]) -> list[float]:
    return [-float(len(text)) for text in completions]


NAMELESS = lambda completions: [0.5] * len(completions)  # noqa: E731
SAMPLE = RewardInput("q", "abc", [1], True)
BUILT_IN = BuiltInRewardParameters(max_completion_length=8)


def policy_options(tmp_path: Path, **more: Any) -> dict[str, Any]:
    sizes = {"num_generations": 4, "global_batch_size": 8, "max_completion_length": 6, "max_length": 32, "max_steps": 2}
    places = {"output_dir": str(tmp_path / "out"), "dataset_cache_dir": str(tmp_path / "cache")}
    return {"task": "grpo", "report_to": "none", "torch_dtype": "float32", **sizes, **places, **more}


def test_a_function_is_a_value_with_a_name() -> None:
    config = SwiftConfig(task="grpo", reward_funcs=[shorter, "format", NAMELESS])
    assert config.rewards.reward_funcs == (f"{__name__}:shorter", "format", f"{__name__}:<lambda>")
    written = yaml.safe_load(config.to_yaml())
    assert written["rewards"]["reward_funcs"] == [*config.rewards.reward_funcs]
    for made in (config, config.replace(max_steps=3), Trainer("DIR", config, max_steps=4).config):
        functions = load_reward_functions(made.rewards.reward_funcs, BUILT_IN)
        assert [f.name for f in functions] == ["shorter", "format", "<lambda>"]
        assert functions[0]([SAMPLE]) == [-3.0] and functions[2]([SAMPLE]) == [0.5]
    assert SwiftConfig(task="grpo", reward_funcs=shorter).rewards.reward_funcs == (f"{__name__}:shorter",)


def test_functions_of_one_name_are_told_apart() -> None:
    def made(value: float) -> Callable[..., list[float]]:
        return lambda completions: [value]

    given = [made(0.25), made(0.75), functools.partial(shorter)]
    config = SwiftConfig(task="grpo", reward_funcs=given)
    functions = load_reward_functions(config.rewards.reward_funcs, BUILT_IN)
    assert [f([SAMPLE]) for f in functions] == [[0.25], [0.75], [-3.0]]
    assert len({f.name for f in functions}) == 3 and functions[2].name == "shorter"
    config = SwiftConfig(task="grpo", reward_funcs=[shorter, shorter])
    with pytest.raises(ConfigError, match="is given twice"):
        load_reward_functions(config.rewards.reward_funcs, BUILT_IN)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"loss_type": shorter}, r"is a Python object, but this option takes text(.|\n)*megaswift.plugins"),
        ({"reward_funcs": [3.5]}, "must be text"),
        ({"reward_funcs": "nosuch"}, ""),
    ],
)
def test_objects_where_none_belong(options: dict[str, Any], told: str) -> None:
    if told:
        with pytest.raises(ConfigError, match=told):
            SwiftConfig(task="grpo", **options)
    else:
        (problem,) = reward_environment_and_model_problems(SwiftConfig(task="grpo", **options))
        assert "is unknown" in problem.rule and "FILE.py:FUNCTION" in problem.fix


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (torch.nn.Linear(1, 1), r'is a loaded model \(Linear\)(.|\n)*reward_model=\["DIR"\]'),
        (Counter, "Counter is a class"),
        (lambda completions, trainer_state: [], "requires the column trainer_state(.|\n)*TRL passes it"),
    ],
)
def test_what_is_no_reward_is_told_with_what_to_do(given: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config = SwiftConfig(task="grpo", reward_funcs=given)
        functions = load_reward_functions(config.rewards.reward_funcs, BUILT_IN)
        raise ConfigError(missing_reward_column_problems(functions, frozenset({"number"})))


@pytest.mark.usefixtures("kept")
def test_what_other_processes_cannot_import_is_refused(tmp_path: Path) -> None:
    """Functions without a name, registered names, callbacks; a function of a module is not."""
    plugins.reward("of_this_process", shorter)
    options = policy_options(tmp_path, nproc_per_node=2, reward_funcs=[shorter, NAMELESS, "of_this_process"])
    rows = [{"prompt": "1+1="}] * 8
    with pytest.raises(ConfigError) as caught:
        Trainer("DIR", **options, train_dataset=rows, callbacks=Hook()).train()
    assert [p.what for p in caught.value.problems] == [
        f"reward_funcs={__name__}:<lambda>",
        "reward_funcs=of_this_process",
        "callback megaswift.trainers.hook:Hook()",
    ]
    assert "torchrun --nproc_per_node 2 SCRIPT.py" in caught.value.problems[0].fix


# ---- the arguments of a trainer, and its result


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"model": torch.nn.Linear(1, 1)}, "model: is a loaded Linear; (.|\n)*model.save_pretrained"),
        ({"callbacks": [print]}, "callbacks: print is no megaswift.trainers.hook.Hook"),
        ({"config": SwiftConfig(), "task": "dpo"}, "task='dpo': conflicts with the configuration, which is of sft"),
        ({"args": SwiftConfig(), "task": "dpo"}, "task='dpo': conflicts with the configuration, which is of sft"),
        ({"nosuch": 1}, "nosuch=1: is not an option"),
        ({"processing_class": 3, "model": "DIR", "train_dataset": "d"}, "tokenizer: is of type int"),
    ],
)
def test_wrong_arguments_of_a_trainer(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Trainer(**arguments).train()


def test_a_printed_result_is_one_line() -> None:
    metrics = {"step": 7, "loss": 0.123456, "reward": 1.5, "grad_norm": 3.0, "mfu": None}
    result = TrainOutput(Path("out"), 7, metrics, {"loss": 2.0, "step": 7}, [metrics] * 7)
    said = "TrainOutput(output_dir='out', global_step=7, loss=0.1235, reward=1.5, eval_loss=2)"
    assert repr(result) == str(result) == said


def test_when_a_run_starts_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process that has trained there, and at a notebook's prompt; never where the user has said what to do."""
    cfg = SwiftConfig(output_dir=str(tmp_path / "out"))
    asked = [{"resume_from_checkpoint": "latest"}, {"add_version": True}]
    assert not starts_over(cfg)
    monkeypatch.setattr("megaswift.api._output_folders", {tmp_path / "out"})
    assert starts_over(cfg) and not any(starts_over(cfg.replace(**one)) for one in asked)
    monkeypatch.setattr("megaswift.api._output_folders", set())
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert starts_over(cfg) and not any(starts_over(cfg.replace(**one)) for one in asked)
    assert not starts_over(SwiftConfig()), "a new version of the default folder is made anyway"


@pytest.mark.process
def test_an_error_that_no_script_catches_is_one_message() -> None:
    for line in ("SwiftConfig(nosuch=1)", "Trainer(model='DIR').train()"):
        code = f"from megaswift import SwiftConfig, Trainer; {line}"
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert ended.returncode == 2 and ended.stderr.startswith("megaswift: the configuration is wrong\n")
        assert "Traceback" not in ended.stderr
    others = subprocess.run(
        [sys.executable, "-c", "from megaswift import Trainer; 1 / 0"], capture_output=True, check=False
    )
    assert others.returncode == 1 and b"ZeroDivisionError" in others.stderr


def test_a_notebook_shows_the_message_alone() -> None:
    """IPython prints the lines of this method in place of a traceback."""
    error = ConfigError(Problem("tp", "is wrong", "tp=2"))
    assert error._render_traceback_() == error.message().split("\n") and len(error._render_traceback_()) == 3


# ---- whole runs


def example(page: str, heading: str) -> str:
    """The Python block of a section of the docs."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    found = re.search(rf"^#+ {heading}\n.*?```python\n(.*?)```", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.process
def test_the_notebook_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A cell that is run twice: two runs, the first one kept; what it prints is what the page says."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "DIR")
    (tmp_path / "cell.py").write_text(example("rewards.md", "In a script or notebook"), encoding="utf-8")
    for number in (1, 2):
        result = runpy.run_path("cell.py", run_name="__main__")["result"]
        assert result.global_step == 2 and {"rewards/exact/mean", "rewards/repetition/mean"} <= result.metrics.keys()
        assert (tmp_path / "out/replaced").is_dir() == (number == 2)
    first = (tmp_path / "out/replaced/1/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["loss"] for line in first] == [line["loss"] for line in result.log_history]
    assert (tmp_path / "out/hf/config.json").is_file() and (tmp_path / "out/replaced/1/hf/config.json").is_file()
    written = yaml.safe_load((tmp_path / "out/config.yaml").read_text(encoding="utf-8"))
    assert written["rewards"]["reward_funcs"] == ["__main__:exact", "repetition"]
    said = capsys.readouterr()
    assert said.out.count("TrainOutput(output_dir='out', global_step=2, loss=") == 2
    assert said.err.count("the earlier run in out was moved to out/replaced/1") == 1


@pytest.mark.process
@pytest.mark.usefixtures("kept")
def test_the_script_of_the_plugins_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """An estimator, a callback and a reward, none of them in a file of `--external_plugins`."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "DIR")
    (tmp_path / "script.py").write_text(example("plugins.md", "In a script or notebook"), encoding="utf-8")
    history = runpy.run_path("script.py", run_name="__main__")["result"].log_history
    said = capsys.readouterr().out.splitlines()
    assert [f"step {line['step']}: reward {line['reward']:.2f}" for line in history] == [
        line for line in said if line.startswith("step ")
    ]
    assert len(history) == 2 and not PLUGIN_HOOKS, "the callback was of this trainer alone"


SCRIPT = """
import os, sys
from megaswift import SwiftConfig, Trainer, plugins
from megaswift.trainers.hook import Hook

KIND = sys.argv[1]

@plugins.policy_loss("unclipped")
def unclipped(x):
    return -x.weights * x.advantages if KIND != "loss" else x.nosuch

@plugins.advantage_estimator("same")
def same(x):
    return x.rewards if KIND != "advantage" else x.rewards[:3]

class Watch(Hook):
    def on_step(self, run, step):
        assert KIND != "callback", "not today"

def length(completions, number, **columns):
    assert isinstance(completions[0], str) and len(completions) == len(number)
    return [n - len(text) / 10 for text, n in zip(completions, number)][KIND == "reward":]

rows = [{"prompt": f"{i}+1=", "number": i} for i in range(8)]
options = dict(num_generations=4, global_batch_size=8, max_completion_length=6, max_length=32, max_steps=2)
options |= dict(loss_type="unclipped", advantage_estimator="same", torch_dtype="float32", report_to="none")
options |= dict(output_dir="out", dataset_cache_dir="cache")
print(Trainer("DIR", task="grpo", reward_funcs=length, train_dataset=rows, callbacks=[Watch], **options).train())
"""


def started(folder: Path, ranks: int, kind: str) -> subprocess.CompletedProcess[str]:
    """The script in a folder with a model, by Python itself or by torchrun."""
    folder.mkdir()
    write_model(folder / "DIR")
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    launched = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, *launched, "script.py", kind]
    return subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.process
def test_the_same_script_on_one_process_and_under_torchrun(tmp_path: Path) -> None:
    lines = []
    for ranks in (1, 2):
        ended = started(tmp_path / str(ranks), ranks, "fine")
        assert ended.returncode == 0 and "TrainOutput(output_dir='out', global_step=2" in ended.stdout, ended.stderr
        lines.append(read_lines(tmp_path / str(ranks) / "out/metrics.jsonl"))
        written = yaml.safe_load((tmp_path / str(ranks) / "out/config.yaml").read_text(encoding="utf-8"))
        assert written["rewards"]["reward_funcs"] == ["__main__:length"]
    for one, two in zip(*lines, strict=True):
        for name in ("loss", "reward", "rewards/length/mean", "grad_norm"):
            assert one[name] == pytest.approx(two[name], rel=1e-4)


WRONG = {
    "reward": r"reward_funcs=__main__:length: returned 7 values for 8 samples \(defined at .*script.py:\d+\)",
    "advantage": r"advantage_estimator=same: the estimator of .*script.py:\d+ returned a tensor of shape \[3\]",
    "loss": r"loss_type=unclipped: the loss of .*script.py:\d+ failed\n(.|\n)*line 10(.|\n)*has no attribute 'nosuch'",
    "callback": r"callback __main__:Watch: on_step failed\n(.|\n)*line 18(.|\n)*AssertionError: not today",
}


@pytest.mark.slow
@pytest.mark.process
def test_a_mistake_in_code_of_a_script_is_one_message(tmp_path: Path) -> None:
    assert_one_message("callback", 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", WRONG)
def test_each_kind_of_mistake_is_one_message(kind: str, ranks: int, tmp_path: Path) -> None:
    assert_one_message(kind, ranks, tmp_path)


def assert_one_message(kind: str, ranks: int, tmp_path: Path) -> None:
    ended = started(tmp_path / "made", ranks, kind)
    said = ended.stderr.partition("torch/distributed/elastic")[0]  # torchrun's own report follows
    told = WRONG[kind] if ranks == 1 else WRONG[kind].replace("7 values for 8", "3 values for 4")
    assert re.search(f"  - {told}", said) and "Traceback" not in said and said.count("cannot be used") == 1, said
    assert ended.returncode == 2 if ranks == 1 else "exitcode: 2" in ended.stderr


@pytest.mark.slow
@pytest.mark.process
def test_processes_that_megaswift_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of a module is imported there. A run that fails there is an error here, with its exit code."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    text = "def size(completions, number):\n    return [n / len(t) for n, t in zip(number, completions)]\n"
    (tmp_path / "of_mine.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    size = importlib.import_module("of_mine").size
    rows = [{"prompt": f"{i}+1=", "number": i} for i in range(8)]
    options = policy_options(tmp_path, nproc_per_node=2, add_version=True, reward_funcs=size)
    trainer = Trainer(write_model(tmp_path / "model"), **options, train_dataset=rows)
    result = trainer.train()
    assert result.global_step == 2 and result.output_dir.parent == tmp_path / "out"
    assert "rewards/size/mean" in result.metrics
    monkeypatch.setattr("megaswift.launchers.torchrun_launcher.run_torchrun_with_restarts", lambda *_: 3)
    with pytest.raises(RunFailedError, match="2 processes: ended with exit code 3") as caught:
        trainer.train(rows)
    assert caught.value.exit_code == 3


@pytest.mark.slow
@pytest.mark.parametrize("chat", [False, True])
def test_a_function_gets_what_trl_gives_it(chat: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same arguments in the same form, but for those that only TRL has; and those that it has not."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    from trl import GRPOConfig, GRPOTrainer

    seen: list[dict[str, Any]] = []

    def reward(**given: Any) -> list[float]:
        seen.append(given)
        return [float(i) for i in range(len(given["completions"]))]

    model = write_model(tmp_path / "model")
    prompts = [f"{i}+1=" for i in range(4)]
    rows = [{"prompt": [{"role": "user", "content": p}] if chat else p, "number": i} for i, p in enumerate(prompts)]
    data = datasets.Dataset.from_list(rows)
    sizes = {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 6, "max_steps": 1}
    args = GRPOConfig(str(tmp_path / "trl"), **sizes, report_to="none", use_cpu=True, bf16=False, save_strategy="no")
    GRPOTrainer(str(model), reward, args, data).train()
    options = policy_options(tmp_path, **sizes, global_batch_size=4)
    Trainer(model, reward_funcs=reward, train_dataset=data, **options).train()
    theirs, ours = seen
    assert set(theirs) - {*OF_TRL} == set(ours) - {"completion_mask"}
    for name in set(ours) - {"completion_mask"}:
        assert form(ours[name]) == form(theirs[name]), name


def form(value: Any) -> Any:
    """Types, lengths of outer lists and names of fields."""
    if isinstance(value, dict):
        return {name: form(inner) for name, inner in value.items()}
    return [form(value[0])] if isinstance(value, list) else type(value).__name__
