"""Runs under Ray: real local Rays of two workers on a CPU, against the same runs under torchrun; and how they end.

Covers: megaswift/launchers/ray_cluster.py, megaswift/launchers/ray_messages.py, megaswift/launchers/ray_train.py,
megaswift/launchers/ray_worker.py.
"""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
import time
from importlib import metadata, util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaswift.clusters.job import Role
from megaswift.commands import training
from megaswift.commands.submit import roles_of
from megaswift.config import SwiftConfig, load_config
from megaswift.errors import ConfigError
from megaswift.launchers import ray_cluster
from megaswift.launchers.launcher import RoleResources
from megaswift.launchers.options.launch import LaunchConfig
from megaswift.launchers.ray_cluster import ray_address
from megaswift.launchers.ray_messages import RunMessageActor, WorkerEventsSinceLastPoll
from megaswift.launchers.ray_train import _reserves_gpu, _Run, missing_ray_problems
from megaswift.trainers.checkpoints import CheckpointStore
from megaswift.trainers.hooks.metrics import read_lines
from tests.launchers.test_other_launchers import SCRIPT, SFT, environment, file, start  # noqa: F401 (a fixture)
from tests.run.test_training import values
from tests.sources import ROOT

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
    (tmp_path / "bad.jsonl").write_text('{"messages": [{"role": 7}]}\n')
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


@pytest.mark.parametrize(
    ("workers", "roles", "lacks"),
    [
        (6, RoleResources(2, 2), ""),
        (7, RoleResources(2, 2), "7 processes with a GPU each, and engines with 2 GPUs: the cluster has 8 GPUs"),
        (
            6,
            RoleResources(5, 2),
            "6 processes with 1 core each, and other roles with 5 cores: the cluster has 10 cores",
        ),
    ],
)
def test_other_roles_of_a_run_count(
    workers: int, roles: RoleResources, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 10.0, "GPU": 8.0})
    launch = LaunchConfig(launcher="ray", num_workers=workers)
    if not lacks:
        assert _reserves_gpu(launch, roles)
        return
    with pytest.raises(ConfigError, match=lacks):
        _reserves_gpu(launch, roles)


def test_what_engines_and_environments_take() -> None:
    vllm = {"rollout_backend": "vllm", "vllm_tensor_parallel_size": 2, "sampler_engines": 3, "cpus_per_engine": 4}
    worlds = {"environment": "e.py:E", "environment_placement": "cpu", "environment_workers": 5}
    cfg = SwiftConfig(task="grpo", reward_funcs=["length"], **vllm, **worlds)
    assert training.resources_of_roles(cfg) == RoleResources(17, 6)
    assert [*roles_of(cfg, True)] == [Role("engines", 3, 4, 2), Role("environments", 5, 1, 0)]
    assert [*roles_of(cfg.replace(environment_placement="trainer"), False)] == [Role("engines", 3, 4, 0)]


def test_a_ray_that_does_not_start_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine: Ray raises a plain exception."""

    def late(*_: Any, **__: Any) -> None:
        raise Exception("The current node timed out during startup. This could happen.")

    monkeypatch.setattr("ray.init", late)
    monkeypatch.setattr(ray_cluster, "os", SimpleNamespace(environ={}, pathsep=":"))
    with pytest.raises(ConfigError, match="Ray at local: cannot be started: The current node timed out") as error:
        ray_cluster.connect_to_ray("local", 1)
    assert "--ray_address HOST:PORT" in str(error.value)
    monkeypatch.setattr("ray.init", lambda *_, **__: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        ray_cluster.connect_to_ray("local", 1)


def test_the_cluster_of_a_process() -> None:
    """One that Ray has started belongs to its cluster, whatever the option says."""
    launch = LaunchConfig(launcher="ray", ray_address="local")
    assert ray_address(launch, {"RAY_ADDRESS": "h:1"}) == "local"
    assert ray_address(launch, {"RAY_ADDRESS": "h:1", "MEGASWIFT_RUN": "x"}) == "h:1"
    assert ray_address(LaunchConfig(), {"RAY_ADDRESS": "h:1"}) == "h:1" and ray_address(LaunchConfig(), {}) == "local"


@pytest.mark.process
@pytest.mark.slow
def test_a_ray_of_one_machine_is_not_reached_from_others(ray_folder: dict[str, str]) -> None:
    """None of its programs listens on another address than the loopback one."""
    script = """
import psutil
from megaswift.launchers.ray_cluster import connect_to_ray
connect_to_ray("local", 2)
import ray
@ray.remote
def look():
    return 1
ray.get(look.remote())
for process in psutil.Process().children(recursive=True):
    for connection in process.net_connections("inet"):
        if connection.status == psutil.CONN_LISTEN:
            print("listens", process.name(), connection.laddr.ip)
ray.shutdown()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(ROOT) | ray_folder, capture_output=True, text=True, check=True
    )
    found = [line.split() for line in done.stdout.splitlines() if line.startswith("listens")]
    assert {"raylet", "gcs_server"} <= {words[1] for words in found}, done.stdout
    assert {words[-1].removeprefix("::ffff:") for words in found} <= {"127.0.0.1", "::1"}, found
