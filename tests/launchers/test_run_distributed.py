"""scripts/run_distributed.py: what it makes of its options, and what it refuses. That it trains is
test_other_launchers.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import megaswift
from megaswift.commands import training
from megaswift.launchers import torchrun_launcher
from megaswift.options.tasks import RL, TASKS
from scripts import run_distributed

KNOWN = f"tasks are {', '.join(TASKS)}"
FILE = "model: DIR\ndataset: d.jsonl\nlr: 1e-4\n"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NPROC_PER_NODE", "NNODES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(FILE)


@pytest.mark.parametrize(
    "line, parts",
    [
        ("--config none.yaml", ["none.yaml: no such file"]),
        (
            "--config run.yaml --algorithm sfft",
            [f"--algorithm sfft: is not a supported task; {KNOWN}", "did you mean sft?"],
        ),
        (
            "--algorithm nosuch",
            ["(2 problems)", f"--algorithm nosuch: is not a supported task; {KNOWN}", "--config: is missing"],
        ),
        ("--config none.yaml --algorithm sft --use_torchrun", ["none.yaml: no such file"]),
        ("--config none.yaml --algorithm sft", ["none.yaml: no such file"]),
        (
            "--config run.yaml --algorithm sft --use_torchrun --launcher ray --num_workers 2",
            ["--use_torchrun: the launcher is ray"],
        ),
        (
            "--config run.yaml --algorithm sft --use_torchrun --lr x --nnodes 0",
            ["(2 problems)", "--lr x", "--nnodes 0"],
        ),
    ],
)
def test_mistakes_end_with_2(line: str, parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = run_distributed.main(line.split())
    except SystemExit as left:  # entry.main ends the process itself
        code = left.code
    err = capsys.readouterr().err
    assert code == 2 and all(part in err for part in parts), err


def test_without_use_torchrun_it_is_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(training, "main", lambda task, words: seen.append((task, words)) or 7)
    line = "--lr 3 --nnodes=1 --algorithm pt --min_lr -1 --nproc_per_node 2 --config run.yaml --dataset a b"
    assert run_distributed.main(line.split()) == 7
    words = ["run.yaml", "--nproc_per_node", "2", "--nnodes", "1", "--lr", "3", "--min_lr", "-1", "--dataset", "a", "b"]
    assert seen == [("pt", words)]


@pytest.mark.parametrize(
    ("text", "task"),
    [("training_task: grpo", "grpo"), ("algorithm: pt", "pt"), ("task: dpo", "dpo"), ("lr: 1e-4", "sft")],
)
def test_the_file_names_the_task(text: str, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(training, "main", lambda task, words: seen.append(task) or 0)
    (tmp_path / "run.yaml").write_text(f"{text}\n" + "reward_funcs: [length]\n" * (task == "grpo"))
    assert run_distributed.main(["--config", str(tmp_path / "run.yaml"), "--nproc_per_node", "2"]) == 0
    assert seen == [task]


def test_with_use_torchrun_one_process_is_torchrun_s_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        torchrun_launcher,
        "run_torchrun_with_restarts",
        lambda command, environ, *_: seen.append((command, environ)) or 1,
    )
    assert run_distributed.main(["--use_torchrun", "--config", "run.yaml", "--algorithm", "sft", "--lr", "1e-5"]) == 1
    ((command, environ),) = seen
    assert command[:5] == [sys.executable, "-m", "megaswift.launchers.torchrun_agent", "--nproc-per-node", "1"]
    assert command[-4:] == [str(Path(megaswift.__file__).with_name("sft.py")), "run.yaml", "--lr", "1e-5"]
    assert "MEGASWIFT_CHECKED" not in environ and environ["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_what_launchers_start(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun takes the file, Ray's workers the module of that name."""
    seen = []
    monkeypatch.setattr(torchrun_launcher, "run_torchrun_with_restarts", lambda command, *_: seen.append(command) or 0)
    words = [
        "--use_torchrun",
        "--nproc_per_node",
        "2",
        "--config",
        "run.yaml",
        "--algorithm",
        task,
        "--per_device_train_batch_size",
        "4",
    ]
    words += ["--reward_funcs", "format"] * (task in RL)
    assert run_distributed.main(words) == 0
    script = Path(next(word for word in seen[0] if word.endswith(".py")))
    assert script.name == f"{task}.py" and script.is_file() and f'main("{task}")' in script.read_text()


def test_a_worker_starts_no_torchrun_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(training, "main", lambda task, words: seen.append(words) or 0)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    assert run_distributed.main(["--use_torchrun", "--config", "run.yaml", "--algorithm", "sft"]) == 0
    assert seen == [["run.yaml"]]
