"""Whole runs with planted faults: out of memory, replicas that differ, a GPU with errors, notice of preemption.

Covers: trainers/fault_tolerance_hooks.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trainers.planted import BACKWARD, run_with_fault, run_without_fault

OUT_OF_MEMORY = (
    BACKWARD
    + """
import torch
from megaswift.data.batches import loader

def fault(number):
    if number == 3 and "MEGASWIFT_RESTARTS" not in os.environ:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB (planted)")

import os
"""
)
TOO_MANY_ROWS = """
import torch
from megaswift.engine.megatron import forward_backward

inputs = forward_backward.microbatch_inputs

def planted(batch, *values):
    if batch.input_ids.shape[0] > 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB (planted)")
    return inputs(batch, *values)

forward_backward.microbatch_inputs = planted
"""
FLIPPED = """\
import torch
from megaswift.trainers.hook import Run

emit = Run.emit

def planted(self, event, *values):
    if event == "on_step" and self.step == 3:
        chunks = getattr(self.engine, "plain", None) or [self.engine.fields.model]
        weight = max(chunks[0].parameters(), key=lambda p: p.numel()).data
        weight.view(torch.int32).view(-1)[5] ^= 1 << 12
    emit(self, event, *values)

Run.emit = planted
"""


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "out/metrics.jsonl").read_text().splitlines()]


@pytest.mark.process
@pytest.mark.parametrize(
    "options", ["", pytest.param("--nproc_per_node 2", marks=pytest.mark.slow)], ids=["alone", "two processes"]
)
def test_out_of_memory_is_retried_once(options: str, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir(), (tmp_path / "faulty").mkdir()
    run_without_fault(tmp_path / "whole", ranks=2 if options else 1)
    done = run_with_fault(tmp_path / "faulty", int(bool(options)), OUT_OF_MEMORY, f"{options} --save_steps 1")
    assert done.returncode == 0, done.stderr
    assert "out of memory, starting again with a smaller micro-batch" in done.stderr
    assert "--per_device_train_batch_size 2 in place of 4" in done.stderr
    assert losses(tmp_path / "faulty") == pytest.approx(losses(tmp_path / "whole"), rel=2e-5)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "--nproc_per_node 2"], ids=["alone", "two processes"])
def test_a_micro_batch_that_fits_is_found(options: str, tmp_path: Path) -> None:
    """Rank 1 lacks memory at the first backward pass of more than one row, 4 and 2, and a resumed run begins with 1."""
    (tmp_path / "whole").mkdir(), (tmp_path / "faulty").mkdir()
    run_without_fault(tmp_path / "whole", ranks=2 if options else 1)
    words = f"{options} --auto_find_batch_size true --save_steps 3 --padding_free false"
    done = run_with_fault(tmp_path / "faulty", int(bool(options)), TOO_MANY_ROWS, f"{words} --exit_interval 3")
    assert done.returncode == 0, done.stderr
    assert "--per_device_train_batch_size 2 in place of 4" in done.stderr
    assert "--per_device_train_batch_size 1 in place of 2" in done.stderr
    assert "--per_device_train_batch_size 1 in place of 4, the same 8 rows a step" in done.stdout + done.stderr
    resumed = f"{words} --resume_from_checkpoint latest"
    done = run_with_fault(tmp_path / "faulty", int(bool(options)), TOO_MANY_ROWS, resumed)
    assert done.returncode == 0 and "starting again" not in done.stderr, done.stderr
    assert losses(tmp_path / "faulty") == pytest.approx(losses(tmp_path / "whole"), rel=2e-5)


@pytest.mark.process
@pytest.mark.slow
def test_not_twice_and_not_unasked(tmp_path: Path) -> None:
    always = OUT_OF_MEMORY.replace(' and "MEGASWIFT_RESTARTS" not in os.environ', "")
    (tmp_path / "twice").mkdir(), (tmp_path / "off").mkdir()
    twice = run_with_fault(tmp_path / "twice", 0, always, "")
    assert twice.returncode == 2 and twice.stderr.count("starting again") == 1, twice.stderr
    assert "in this order" in twice.stderr
    off = run_with_fault(tmp_path / "off", 0, always, "--oom_retry false")
    assert off.returncode == 2 and "starting again" not in off.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    "options",
    [
        "--nproc_per_node 2",
        pytest.param("--engine ddp --nproc_per_node 2", marks=pytest.mark.slow),
        pytest.param("--engine zero2 --nproc_per_node 2", marks=pytest.mark.slow),
    ],
    ids=["native", "ddp", "zero2"],
)
def test_a_flipped_bit_is_found_before_it_is_saved(options: str, tmp_path: Path) -> None:
    done = run_with_fault(tmp_path, 1, FLIPPED, f"{options} --check_replicas_interval 6 --save_steps 3")
    assert done.returncode == 1, done.stderr
    assert "data-parallel replicas hold different weights" in done.stderr and "step 3: rank 1 (" in done.stderr
    assert not list((tmp_path / "out/checkpoints").glob("step-*"))


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    ["--nproc_per_node 2 --overlap_param_gather true --overlap_grad_reduce true", "--engine ddp --nproc_per_node 2"],
    ids=["native", "ddp"],
)
def test_equal_replicas_train_on(options: str, tmp_path: Path) -> None:
    done = run_with_fault(tmp_path, 9, "", f"{options} --check_replicas_interval 1")
    assert done.returncode == 0 and len(losses(tmp_path)) == 6, done.stderr


@pytest.mark.process
@pytest.mark.slow
def test_a_gpu_with_errors_ends_the_run_without_a_checkpoint(tmp_path: Path) -> None:
    tool = tmp_path / "bin/nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(
        '#!/bin/sh\ncase "$*" in *ecc*) ;; *) exit 2;; esac\n'
        '[ -s "$(dirname "$0")/../out/metrics.jsonl" ] && echo "2, [N/A]" || echo "0, [N/A]"\n'
    )
    tool.chmod(0o755)
    import os

    path = f"{tool.parent}:{os.environ['PATH']}"
    done = run_with_fault(
        tmp_path, 9, "", "--gpu_health_interval 2 --save_steps 3 --nproc_per_node 1 --max_restarts 2", PATH=path
    )
    assert done.returncode == 4, done.stderr
    assert "a GPU reports hardware errors" in done.stderr and "2 uncorrectable ECC errors, at step 2" in done.stderr
    assert not list((tmp_path / "out/checkpoints").glob("step-*"))


NOTICE = (
    BACKWARD
    + """
import os, pathlib, psutil, signal, time

def fault(number):
    if number == 3 and not os.path.exists("notice"):
        pathlib.Path("notice").touch()
        while not signal.getsignal(signal.SIGTERM).number:
            time.sleep(0.01)
"""
)
"""Gives notice in the third backward pass, which ends when the run has received a signal."""
SIGTERM = NOTICE.replace('pathlib.Path("notice").touch()', "os.kill(psutil.Process(os.getppid()).ppid(), 15)")
"""The same, by SIGTERM to the command: the launcher's agent is between it and the rank."""


@pytest.mark.process
@pytest.mark.parametrize(
    ("fault", "options", "code"),
    [
        (NOTICE, "--preemption_interval 0.05 --preemption_command test\0-e\0notice", 138),
        pytest.param(
            NOTICE,
            "--preemption_interval 0.05 --preemption_command test\0-e\0notice --nproc_per_node 2 --max_restarts 2",
            138,
            marks=pytest.mark.slow,
        ),
        pytest.param(SIGTERM, "--nproc_per_node 2 --max_restarts 2", 143, marks=pytest.mark.slow),
    ],
    ids=["command", "command, two processes", "SIGTERM, two processes"],
)
def test_a_spot_notice_and_the_run_that_goes_on(fault: str, options: str, code: int, tmp_path: Path) -> None:
    """It saves, ends without a restart, and resumed it has the losses and weights of a run without notice, to the
    bit."""
    whole, faulty = tmp_path / "whole", tmp_path / "faulty"
    whole.mkdir(), faulty.mkdir()
    ranks = 2 if "--nproc" in options else 1
    run_without_fault(whole, ranks=ranks)
    done = run_with_fault(faulty, 0, fault, options)
    assert done.returncode == code and "restart 1" not in done.stderr, done.stderr
    assert ("this machine will be taken away" in done.stderr) == (code == 138)
    kept = list((faulty / "out/checkpoints").glob("step-*"))
    assert 3 <= len(losses(faulty)) < 6 and len(kept) == 1
    run_without_fault(faulty, "--resume_from_checkpoint", "latest", ranks=ranks)
    assert losses(faulty) == losses(whole)
    weights = [(folder / "out/hf/model.safetensors").read_bytes() for folder in (whole, faulty)]
    assert len(losses(whole)) == 6 and weights[0] == weights[1]
