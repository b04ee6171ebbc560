"""Runs in which one rank stops inside a step end soon after --ddp_timeout, with its name, whatever the engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.trainers.inputs import write_model
from tests.trainers.planted import BACKWARD, run_with_fault

HANG = (
    BACKWARD
    + """
import time

def fault(number):
    while number == 3:
        time.sleep(600)
"""
)
"""Only --ddp_timeout ends the run."""


@pytest.mark.process
@pytest.mark.parametrize(
    ("rank", "options", "operation"),
    [
        pytest.param(rank, options, operation, id=name, marks=pytest.mark.slow)
        for name, rank, options, operation in (
            ("pp2", 1, "--pp 2 --nproc_per_node 2", "of PIPELINE_MODEL_PARALLEL_GROUP (ranks 0, 1)"),
            ("tp2", 0, "--tp 2 --nproc_per_node 2", "of TENSOR_MODEL_PARALLEL_GROUP (ranks 0, 1)"),
            ("tp2 pp2", 3, "--tp 2 --pp 2 --nproc_per_node 4", "of TENSOR_MODEL_PARALLEL_GROUP (ranks 2, 3)"),
            ("ddp", 1, "--engine ddp --nproc_per_node 2", "all_reduce of all ranks"),
            ("fsdp2", 1, "--engine fsdp2 --nproc_per_node 2", "of all ranks"),
            ("cp2", 1, "--cp 2 --nproc_per_node 2", "of CONTEXT_PARALLEL_GROUP (ranks 0, 1)"),
            ("zero1", 1, "--engine zero1 --nproc_per_node 2", "all_reduce of "),
            ("zero2", 1, "--engine zero2 --nproc_per_node 2", "all_reduce of a group (ranks 0, 1)"),
            ("zero3", 1, "--engine zero3 --nproc_per_node 2", "of all ranks"),
        )
    ],
)
def test_it_is_named(rank: int, options: str, operation: str, tmp_path: Path) -> None:
    done = run_with_fault(tmp_path, rank, HANG, f"{options} --ddp_timeout 8")
    assert done.returncode == 1, done.stderr
    assert f"- rank {rank}: did not join " in done.stderr and operation in done.stderr, done.stderr
    step = 2 if "--pp" in options else 3  # a pipeline has two micro-batches a step
    assert f"within 8 s (--ddp_timeout) in step {step}" in done.stderr, done.stderr
    assert f"rank {rank} runs planted_fault.py:" in done.stderr
    assert "in fault" in (tmp_path / f"out/stacks/rank-{rank}.txt").read_text()
    ranks = range(int(options.rpartition(" ")[2]))
    stacks = [(tmp_path / f"out/stacks/rank-{r}.txt").read_text() for r in ranks]
    assert all("most recent call first" in text for text in stacks), "of all ranks"


REWARD = """
import os, time

CALLS = []

def hanging(completions, number, **_):
    CALLS.append(1)
    while os.environ["RANK"] == "1" and len(CALLS) == 2:
        time.sleep(600)
    return [sum(c.isdigit() for c in text) / (1 + len(text)) for text in completions]
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["megatron", "fsdp2"])
def test_a_reward_function_that_hangs_on_one_rank_is_named(engine: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    (tmp_path / "rewards.py").write_text(REWARD)
    rows = [{"prompt": f"{i % 10}+{(7 * i) % 10}=", "number": i} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--model", "model", "--dataset", "rows.jsonl", "--dataset_cache_dir", "cache", "--output_dir", "out"]
    words += ["--reward_funcs", f"{tmp_path / 'rewards.py'}:hanging", "--engine", engine, "--train_type", "full"]
    words += ["--global_batch_size", "8", "--num_generations", "4", "--max_completion_length", "6", "--max_steps", "4"]
    words += ["--max_length", "32", "--per_device_train_batch_size", "4", "--logging_steps", "1"]
    command = [sys.executable, "-m", "megaswift", "rlhf", "--rlhf_type", "grpo", *words]
    command += ["--nproc_per_node", "2", "--ddp_timeout", "20"]
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=os.environ | own, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, done.stderr
    assert "- rank 1: did not join " in done.stderr and "within 20 s (--ddp_timeout) in step 2" in done.stderr
    assert "rank 1 runs rewards.py:9 hanging" in done.stderr, done.stderr
    assert "in hanging" in (tmp_path / "out/stacks/rank-1.txt").read_text()


STOPPED = """
import os, signal, time
from megaswift.bridge.hf import writer as writers

def stops(*words, **named):
    while True:
        HANG

writers.HfWriter.close = writers.HfPartialFolderWriter.add = writers.HfPartialFolderWriter.close = stops
"""
"""A small model is one file, which rank 0 writes; the others close what they could have written."""
STOP, SLEEP = "os.kill(os.getpid(), signal.SIGSTOP)", "time.sleep(600)"


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "options", "hang"),
    [(0, "--nproc_per_node 2", STOP), (0, "--nproc_per_node 2", SLEEP), (1, "--tp 2 --nproc_per_node 2", STOP)],
    ids=["dp2 stopped", "dp2 asleep", "tp2 stopped"],
)
def test_a_rank_that_stops_in_the_export_is_named(rank: int, options: str, hang: str, tmp_path: Path) -> None:
    """What others wait for there is no collective, and may take hours."""
    done = run_with_fault(tmp_path, rank, STOPPED.replace("HANG", hang), f"{options} --ddp_timeout 8")
    assert done.returncode == 1, done.stderr
    assert f"- rank {rank}: did not join the others at the end of its work, without any progress" in done.stderr
    assert "within 8 s (--ddp_timeout)" in done.stderr
