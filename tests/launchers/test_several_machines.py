"""Two machines, as network namespaces with addresses and files of their own: TP inside, PP and DP across; one is lost
and started again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.network_namespaces import Machine, machines, why_not
from tests.sources import ROOT
from tests.trainers.inputs import write_inputs
from tests.trainers.planted import BACKWARD, STARTER

needs_namespaces = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")

ONE_MISTAKE = """
from megaswift.errors import DataError, Problem

def fault(number):
    if number == 3:
        raise DataError(Problem("row 7", "malformed"))
"""

ONE_OUT_OF_MEMORY = """
import os, torch

def fault(number):
    if number == 3 and restart_count(os.environ) == 0:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB (planted)")

from megaswift.launchers.options.variables import restart_count
"""


def start(
    machine: Machine, rank: int, address: str, folder: Path, *options: str, **variables: str
) -> subprocess.Popen[bytes]:
    """One machine's command, as a user types it there."""
    environ = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "NNODES": "2",
        "NODE_RANK": str(rank),
        "MASTER_ADDR": address,
        "NPROC_PER_NODE": "2",
        **variables,
    }
    cache = [] if "--streaming" in options else ["--dataset_cache_dir", str(machine.view)]
    words = [sys.executable, "-m", "megaswift", "sft", *options, *cache]
    log = (folder / f"log-{rank}").open("ab")
    return subprocess.Popen(
        machine.words(words), env=environ, cwd=folder, stdout=log, stderr=log, start_new_session=True
    )


def steps(folder: Path) -> list[int]:
    file = folder / "out/metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "out/metrics.jsonl").read_text().splitlines()]


def inputs(folder: Path, *more: str) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    words = write_inputs(folder)
    at = words.index("--dataset_cache_dir")
    del words[at : at + 2]
    return [*words, "--train_type", "full", "--output_dir", "out", "--logging_steps", "1", *more]


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("axes", ["--tp 2 --pp 2", "--tp 2", "--pp 2", "--cp 2"])
def test_layouts_across_machines(axes: str, tmp_path: Path) -> None:
    """The losses of one process; the files of each machine are its own but for the run's folder."""
    one = inputs(tmp_path / "one", "--max_steps", "3", "--global_batch_size", "8")
    command = [sys.executable, "-m", "megaswift", "sft", *one]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environ, cwd=tmp_path / "one", check=True, capture_output=True, timeout=300)
    two = tmp_path / "two"
    options = inputs(two, "--max_steps", "3", "--global_batch_size", "8", *axes.split())
    with machines(tmp_path / "net") as (first, second):
        running = [start(m, r, first.address, two, *options) for r, m in enumerate((first, second))]
        codes = [process.wait(180) for process in running]
    assert codes == [0, 0], (two / "log-0").read_text() + (two / "log-1").read_text()
    assert losses(two) == pytest.approx(losses(tmp_path / "one"), rel=2e-5)
    assert (two / "out/hf/model.safetensors").exists()
    assert list((tmp_path / "net/own-0").iterdir()) and list((tmp_path / "net/own-1").iterdir())


@pytest.mark.slow
@needs_namespaces
def test_a_lost_machine_joins_again(tmp_path: Path) -> None:
    """All processes of machine 1 are killed; its command is typed again, and the run goes on where it had saved."""
    more = ("--max_steps", "60", "--save_steps", "5", "--tp", "2", "--max_restarts", "2", "--ddp_timeout", "30")
    options = inputs(tmp_path, *more)
    with machines(tmp_path / "net") as (first, second):
        stays = start(first, 0, first.address, tmp_path, *options)
        lost = start(second, 1, first.address, tmp_path, *options)
        deadline = time.monotonic() + 300
        while len(steps(tmp_path)) < 12:
            assert time.monotonic() < deadline and stays.poll() is None, (tmp_path / "log-0").read_text()
            time.sleep(0.1)
        for number in pids_of(second):
            os.kill(number, signal.SIGKILL)
        lost.wait(180)
        again = start(second, 1, first.address, tmp_path, *options)
        codes = [process.wait(180) for process in (stays, again)]
    log = (tmp_path / "log-0").read_text() + (tmp_path / "log-1").read_text()
    assert codes == [0, 0], log
    assert steps(tmp_path) == list(range(1, 61)), log
    assert (tmp_path / "out/hf/model.safetensors").exists()


def pids_of(machine: Machine) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", machine.name], capture_output=True, text=True, check=True)
    return [int(word) for word in found.stdout.split()]


@pytest.mark.slow
@needs_namespaces
def test_a_mistake_that_one_machine_meets_ends_both(tmp_path: Path) -> None:
    """Rank 3 alone meets it, in step 3; --max_restarts starts nothing again, and both exit codes are 2."""
    (tmp_path / "sitecustomize.py").write_text(STARTER)
    (tmp_path / "planted_fault.py").write_text(BACKWARD + ONE_MISTAKE)
    options = inputs(tmp_path, "--max_steps", "60", "--save_steps", "1", "--max_restarts", "2", "--ddp_timeout", "30")
    own = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "FAULTY_RANK": "3"}
    with machines(tmp_path / "net") as (first, second):
        running = [start(m, r, first.address, tmp_path, *options, **own) for r, m in enumerate((first, second))]
        codes = [process.wait(180) for process in running]
    log, other = ((tmp_path / f"log-{node}").read_text() for node in (0, 1))
    assert codes == [2, 2] and "row 7: malformed" in other, log + other
    assert "this node ends too: rank 3 on " in log and "resuming from" not in log, log


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("restarts", ["0", "1"])
def test_out_of_memory_on_one_machine(restarts: str, tmp_path: Path) -> None:
    """Rank 3 alone meets it, in step 3: both machines start once more with a smaller micro-batch and the same rows."""
    more = ["--max_steps", "6", "--save_steps", "1", "--max_restarts", restarts, "--ddp_timeout", "30"]
    one = inputs(tmp_path / "one", "--max_steps", "6", "--global_batch_size", "16")
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "megaswift", "sft", *one]
    subprocess.run(command, env=environ, cwd=tmp_path / "one", check=True, capture_output=True, timeout=300)
    options = inputs(tmp_path / "two", *more)
    (tmp_path / "two/sitecustomize.py").write_text(STARTER)
    (tmp_path / "two/planted_fault.py").write_text(BACKWARD + ONE_OUT_OF_MEMORY)
    own = {"PYTHONPATH": f"{tmp_path / 'two'}:{ROOT}", "FAULTY_RANK": "3"}
    with machines(tmp_path / "net") as both:
        running = [start(m, r, both[0].address, tmp_path / "two", *options, **own) for r, m in enumerate(both)]
        codes = [process.wait(180) for process in running]
    log, other = ((tmp_path / f"two/log-{node}").read_text() for node in (0, 1))
    assert codes == [0, 0], log + other
    assert "--per_device_train_batch_size 2 in place of 4" in log and "the same 16 rows a step" in log, log
    assert "resuming from" in log.lower(), log
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=2e-5)


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("node", [0, 1])
def test_a_machine_that_will_be_taken_away(node: int, tmp_path: Path) -> None:
    """SIGTERM to its command, as a spot notice: all ranks save, both machines end although restarts are left, and the
    same commands go on."""
    options = inputs(tmp_path, "--max_steps", "60", "--max_restarts", "2", "--ddp_timeout", "30")
    with machines(tmp_path / "net") as both:
        running = [start(m, r, both[0].address, tmp_path, *options) for r, m in enumerate(both)]
        deadline = time.monotonic() + 300
        while len(steps(tmp_path)) < 5:
            assert time.monotonic() < deadline, (tmp_path / "log-0").read_text()
            time.sleep(0.1)
        running[node].terminate()
        codes = [process.wait(180) for process in running]
        first = (tmp_path / "log-0").read_text() + (tmp_path / "log-1").read_text()
        assert codes == [143, 143] and f"this node ends too: node {node} (" in first, first
        assert len(list((tmp_path / "out/checkpoints").glob("step-*"))) == 1, first
        options += ["--resume_from_checkpoint", "latest"]
        running = [start(m, r, both[0].address, tmp_path, *options) for r, m in enumerate(both)]
        codes = [process.wait(180) for process in running]
    assert codes == [0, 0] and steps(tmp_path) == list(range(1, 61)), (tmp_path / "log-0").read_text()


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("what", ["megaswift", "data"])
def test_machines_with_another_checkout_or_other_streamed_files(what: str, tmp_path: Path) -> None:
    """Machine 1 has one comment more in the package, or another last row in a streamed file: both end with code 2."""
    options = inputs(tmp_path, "--max_steps", "3", "--streaming", "true")
    at = options.index("--dataset") + 1
    rows = Path(options[at]).read_text().splitlines(keepends=True)
    own: list[dict[str, str]] = [{}, {}]
    with machines(tmp_path / "net") as both:
        for machine, last in zip(both, (rows[-1], rows[-1] if what == "megaswift" else rows[0]), strict=True):
            (machine.own / "data.jsonl").write_text("".join([*rows[:-1], last]))
        options[at] = str(both[0].view / "data.jsonl")
        if what == "megaswift":
            shutil.copytree(ROOT / "megaswift", tmp_path / "other/megaswift")
            with (tmp_path / "other/megaswift/orpo.py").open("a") as module:
                module.write("# a local change\n")
            own[1] = {"PYTHONPATH": str(tmp_path / "other")}
        running = [start(m, r, both[0].address, tmp_path, *options, **own[r]) for r, m in enumerate(both)]
        codes = [process.wait(180) for process in running]
    log = (tmp_path / "log-0").read_text()
    assert codes == [2, 2] and f"{what}: differs between ranks: " in log, log + (tmp_path / "log-1").read_text()
    assert " on ranks 0-1 (" in log and " on ranks 2-3 (" in log and not steps(tmp_path), log


@pytest.mark.slow
@needs_namespaces
def test_a_machine_that_does_not_come_is_named_on_the_other(tmp_path: Path) -> None:
    options = inputs(tmp_path, "--max_steps", "3", "--rdzv_timeout", "5")
    with machines(tmp_path / "net") as (first, second):
        alone = start(first, 0, first.address, tmp_path, *options)
        assert alone.wait(180) == 1
        assert "node 1 of 2 nodes: did not start within 5 s" in (tmp_path / "log-0").read_text()
        alone = start(second, 1, first.address, tmp_path, *options)
        assert alone.wait(180) == 1
        assert f"node 0 at {first.address}:29500: does not answer within 5 s" in (tmp_path / "log-1").read_text()
