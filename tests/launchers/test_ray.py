"""Runs under Ray: real local Rays of two workers on a CPU, against the same runs under torchrun; and how they end.

Covers: megaswift/launchers/ray_messages.py, megaswift/launchers/ray_train.py, megaswift/launchers/ray_worker.py.
"""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
import time
from importlib import metadata, util
from pathlib import Path
from typing import Any

import pytest

from megaswift.commands import training
from megaswift.config import load_config
from megaswift.launchers.ray_messages import RunMessageActor, WorkerEventsSinceLastPoll
from megaswift.launchers.ray_train import _Run, missing_ray_problems
from megaswift.trainers.checkpoints import CheckpointStore
from megaswift.trainers.hooks.metrics import read_lines
from tests.launchers.test_other_launchers import SCRIPT, SFT, environment, file, start  # noqa: F401 (a fixture)
from tests.run.test_training import values

RAY = ["--launcher", "ray", "--ray_address", "local"]
SHORT = ["--max_steps", "2", "--save_steps", "1"]
NATIVE, DDP, FSDP = (["--engine", "megatron", "--tp", "2"], ["--engine", "ddp"], ["--engine", "fsdp2"])


@pytest.fixture
def ray_folder() -> Any:
    """Where Ray keeps its sockets, whose paths may have 107 characters."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        # else Ray writes one into the home folder
        yield {
            "RAY_TMPDIR": folder,
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
        }


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("engine", [NATIVE, DDP, FSDP], ids=["native-tp2", "ddp", "fsdp2"])
def test_the_run_is_that_of_torchrun(engine: list[str], file: str, tmp_path: Path, ray_folder: dict[str, str]) -> None:  # noqa: F811
    """Metrics, files and screen; the first command is the script's, the second what users type."""
    one, other = tmp_path / "ray", tmp_path / "torchrun"
    words = [SCRIPT, *RAY, "--nproc_per_node", "2", "--config", file, "--algorithm", "sft"]
    if engine is DDP:
        words = ["-m", "megaswift", "sft", file, *RAY, "--num_workers", "2"]
    code, text = start([*words, *engine, *SHORT, "--output_dir", str(one)], tmp_path, **ray_folder)
    assert code == 0, text[-3000:]
    assert text.count("megaswift: supervised fine-tuning") == 1 and "on 2 processes" in text and "pid=" not in text, (
        text
    )
    code, torchrun = start([SFT, file, "--nproc_per_node", "2", *engine, *SHORT, "--output_dir", str(other)], tmp_path)
    assert code == 0, torchrun[-3000:]
    mine, theirs = values(one), values(other)
    assert len(mine) == 2
    for a, b in zip(mine, theirs, strict=True):
        assert a.pop("mfu") is b.pop("mfu") is None and a == pytest.approx(b, rel=1e-6)
    assert files(one) == files(other)


def files(out: Path) -> set[str]:
    """Names, but for TensorBoard's, which hold the time."""
    return {str(p.relative_to(out)) for p in out.rglob("*") if "tfevents" not in p.name}


@pytest.mark.process
@pytest.mark.slow
def test_a_mistake_that_a_worker_finds_is_told_once(file: str, tmp_path: Path, ray_folder: dict[str, str]) -> None:  # noqa: F811
    """The data is read by the run's processes only."""
    (tmp_path / "bad.jsonl").write_text('{"messages": [{"role": "user"}]}\n')
    words = [
        SFT,
        file,
        *RAY,
        "--num_workers",
        "2",
        "--dataset",
        str(tmp_path / "bad.jsonl"),
        "--output_dir",
        str(tmp_path / "out"),
    ]
    code, text = start(words, tmp_path, **ray_folder)
    assert (
        code == 2 and text.count("bad.jsonl") == 1 and "failed with exit code" not in text and "Traceback" not in text
    ), text


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_state_and_the_run_goes_on_from_it(
    number: signal.Signals,
    file: str,  # noqa: F811
    tmp_path: Path,
    ray_folder: dict[str, str],
) -> None:
    out = tmp_path / "out"
    words = [SFT, file, *RAY, "--num_workers", "2", "--output_dir", str(out), "--logging_steps", "1", "--max_steps"]
    process = subprocess.Popen(
        [sys.executable, *words, "5000"],
        env=environment(tmp_path) | ray_folder,
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        end = time.monotonic() + 300
        while not ((out / "metrics.jsonl").exists() and read_lines(out / "metrics.jsonl")) and time.monotonic() < end:
            time.sleep(0.2)
        process.send_signal(number)
        text = process.communicate(timeout=300)[0]
    finally:
        process.kill()
    assert process.returncode == 128 + number, text
    assert text.count(f"{number.name} received: saving after this step or the next") == 1, text
    step = CheckpointStore(out / "checkpoints").latest()
    assert step is not None
    done = int(step.name.split("-")[1])
    code, text = start([*words, str(done + 1), "--resume_from_checkpoint", "latest"], tmp_path, **ray_folder)
    assert code == 0 and read_lines(out / "metrics.jsonl")[-1]["step"] == done + 1, text


@pytest.mark.process
@pytest.mark.slow
def test_a_cluster_that_is_too_small_or_absent(file: str, tmp_path: Path, ray_folder: dict[str, str]) -> None:  # noqa: F811
    words = [SFT, file, "--launcher", "ray", "--num_workers", "2"]
    code, text = start([*words, *RAY[2:], "--use_gpu", "true"], tmp_path, **ray_folder)
    assert code == 2 and "2 processes with a GPU each: the cluster has 0 GPUs" in text and "Traceback" not in text, text
    code, text = start([*words, "--ray_address", "127.0.0.1:9"], tmp_path, **ray_folder)
    assert code == 2 and "Ray at 127.0.0.1:9: cannot be reached" in text and "Traceback" not in text, text


# ---- without Ray


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = load_config("sft", [*RAY, "--num_workers", "2"], environ={}).launch
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    (problem,) = missing_ray_problems(launch)
    assert "not installed" in problem.rule and "run pip install 'ray[train]'" in problem.fix
    assert not missing_ray_problems(load_config("sft", [], environ={}).launch)
    monkeypatch.setattr(util, "find_spec", lambda name: object())
    monkeypatch.setattr(metadata, "version", lambda name: "2.44.1")
    (problem,) = missing_ray_problems(launch)
    assert "needs ray 2.51 or later; 2.44.1 is installed" in problem.rule
    monkeypatch.setattr(metadata, "version", lambda name: "2.51.0")
    assert not missing_ray_problems(launch)


@pytest.mark.parametrize(
    "words, parts",
    [
        (["--launcher", "ray"], ["--launcher ray: needs the number of processes", "--num_workers 8"]),
        ([*RAY, "--num_workers", "2", "--lr", "x"], ["--lr x"]),
        (
            [*RAY, "--num_workers", "2", "--master_port", "1"],
            ["--master_port 1: would be ignored: applies only to --launcher torchrun (launcher is ray)"],
        ),
        (["--launcher", "rai", "--num_workers", "2"], ["--launcher rai", "ray"]),
    ],
)
def test_mistakes_end_with_2_before_ray_starts(
    words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NPROC_PER_NODE", "NNODES"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as left:
        training.main("sft", ["--model", "m", "--dataset", "d", *words])
    err = capsys.readouterr().err
    assert left.value.code == 2 and all(part in err for part in parts) and err.count("megaswift:") == 1, err


def test_what_is_said_and_when() -> None:
    exchange = RunMessageActor()
    assert exchange.where() is None
    exchange.meet("h", 7)
    exchange.begin(1)
    exchange.say("a\n")
    assert (
        exchange.where() == ("h", 7)
        and exchange.news() == WorkerEventsSinceLastPoll(["a\n"], 1, {})
        and exchange.news().lines == []
    )
    exchange.signal(2)
    exchange.signal(15)
    assert (exchange.signalled(0), exchange.signalled(1), exchange.signalled(2)) == ([2, 15], [15], [])
    exchange.end(0, 0)
    exchange.end(1, 2)
    assert exchange.news().failed == {1: 2}


@pytest.mark.parametrize(
    "failed, code, line",
    [
        ({1: 2, 0: 1}, 2, ""),
        ({0: 3}, 3, ""),
        ({1: -9, 0: 2}, 1, "rank 1 failed with exit code -9"),
        ({0: 1}, 1, "rank 0 failed with exit code 1"),
        ({}, 0, ""),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed_first(
    failed: dict[int, int], code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _Run(None, None)
    assert run._ended(failed) == code
    err = capsys.readouterr().err
    assert line in err and bool(err) == bool(line)
