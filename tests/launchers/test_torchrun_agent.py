"""torchrun as megaswift starts it: one line and the failed process's exit code; and whole runs that lose a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megaswift.trainers.hooks.metrics import read_lines
from tests.sources import ROOT
from tests.trainers.inputs import write_inputs


@pytest.mark.process
@pytest.mark.parametrize("end, code, lines", [("os._exit(2)", 2, 0), ("os.kill(os.getpid(), signal.SIGKILL)", 137, 1)])
def test_torchrun_s_traceback_is_not_shown(end: str, code: int, lines: int, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(f"import os, signal, time\nif os.environ['RANK'] == '1': {end}\ntime.sleep(20)\n")
    words = [
        "-m",
        "megaswift.launchers.torchrun_agent",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
        "--nproc-per-node",
        "2",
    ]
    done = subprocess.run([sys.executable, *words, str(script)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == code and done.stdout == "" and len(done.stderr.splitlines()) == lines, done.stderr
    assert "rank 1" in done.stderr or not lines


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    words = write_inputs(tmp_path_factory.mktemp("inputs"))
    return [*words, "--save_steps", "4", "--logging_steps", "1", "--report_to", "none", "--split_dataset_ratio", "0"]


def start(words: list[str], out: Path) -> subprocess.Popen[str]:
    """`python WORDS` on a CPU, which has begun; what it prints goes to OUT.log."""
    environ = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    with out.with_suffix(".log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, *words, "--output_dir", str(out)], env=environ, cwd=ROOT, text=True, stdout=log, stderr=log
        )


def finish(process: subprocess.Popen[str], out: Path) -> tuple[int, str]:
    """Its exit code and what it printed; nothing of it lives on."""
    try:
        process.wait(600)
    finally:
        for one in psutil.process_iter(["cmdline"]):
            if str(out) in (one.info["cmdline"] or []):
                one.kill()
    return process.returncode, out.with_suffix(".log").read_text()


def rank_of(out: Path, rank: int, after: int) -> psutil.Process:
    """A rank's process, once the run has logged so many steps."""
    end = time.monotonic() + 300
    while len(read_lines(out / "metrics.jsonl")) < after:
        assert time.monotonic() < end, out.with_suffix(".log").read_text()
        time.sleep(0.02)
    for one in psutil.process_iter(["cmdline"]):
        if str(out) in (one.info["cmdline"] or []) and one.environ().get("RANK") == str(rank):
            return one
    raise AssertionError(f"no rank {rank}")


def wait_for_attempt(out: Path, number: int) -> None:
    """Returns once the run has been resumed so many times: until then the processes of the last attempt are there."""
    log, end = out.with_suffix(".log"), time.monotonic() + 300
    while log.read_text().count("resuming from") < number:
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)


def losses(out: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_lines(out / "metrics.jsonl")}


MEGASWIFT = ["-m", "megaswift", "sft", "--nproc_per_node", "2"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc_per_node", "2"]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        [*MEGASWIFT, "--max_restarts", "2"],
        [*MEGASWIFT, "--max_restarts", "2", "--engine", "ddp"],
        [*TORCHRUN, "--max-restarts", "2", "megaswift/sft.py"],
    ],
    ids=["megaswift", "megaswift ddp", "torchrun"],
)
def test_a_killed_rank_comes_back(words: list[str], inputs: list[str], tmp_path: Path) -> None:
    """SIGKILL of a rank, twice; the run ends with the losses of one that nobody killed."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert finish(start([*words, *inputs, "--max_steps", "40"], whole), whole)[0] == 0
    run = start([*words, *inputs, "--max_steps", "40"], out)
    for times, (after, rank) in enumerate(((5, 1), (13, 0)), 1):
        rank_of(out, rank, after).kill()
        wait_for_attempt(out, times)
    code, said = finish(run, out)
    assert code == 0, said
    assert losses(out) == losses(whole) and len(losses(out)) == 40
    assert said.count("resuming from") == 2


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("extra", [[], ["--tp", "2"], ["--engine", "ddp"]], ids=["dp", "tp", "ddp"])
def test_a_killed_rank_is_one_line(extra: list[str], inputs: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = start([*MEGASWIFT, *inputs, *extra, "--max_steps", "4000"], out)
    rank_of(out, 1, 5).kill()
    code, said = finish(run, out)
    assert code == 137 and "Traceback" not in said and said.count("was killed by SIGKILL") == 1, said
    assert "rank 1 (process" in said


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP, signal.SIGKILL])
def test_a_launcher_that_ends_saves(number: int, inputs: list[str], tmp_path: Path) -> None:
    """Also when it is killed: its workers then save and end by themselves."""
    out = tmp_path / "out"
    run = start([*MEGASWIFT, *inputs, "--max_steps", "4000"], out)
    workers = [rank_of(out, rank, 3) for rank in (0, 1)]
    run.send_signal(number)
    code, said = run.wait(300), out.with_suffix(".log").read_text
    _, alive = psutil.wait_procs(workers, 300)
    assert code == (-9 if number == signal.SIGKILL else 128 + number) and not alive, said()
    assert (out / "checkpoints/latest.json").exists() and "saved; resume with" in said()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("words", [MEGASWIFT, ["-m", "megaswift", "sft"]], ids=["two", "one"])
def test_steps_that_are_all_skipped_fail_the_run(words: list[str], inputs: list[str], tmp_path: Path) -> None:
    """A learning rate of 1e16 overflows; exit code 3 on one process and on several, and no export."""
    out = tmp_path / "out"
    hot = ["1e16" if word == "1e-2" else word for word in inputs]
    code, said = finish(start([*words, *hot, "--max_steps", "9", "--max_grad_norm", "0"], out), out)
    assert code == 3 and "of 9 steps were skipped" in said and "Traceback" not in said, said
    assert not (out / "hf").exists() and said.count("megaswift: training failed") == 1
