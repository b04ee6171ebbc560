"""A program in place of nvidia-smi, with lines written by hand. A whole run: test_fault_tolerance_run.py."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaswift.errors import EXIT_HARDWARE
from megaswift.trainers.hooks.gpu_health import (
    ECC,
    FAILED_ROW,
    SLOWDOWN,
    GpuErrors,
    GpuHealthHook,
    UnhealthyGpu,
    gpu_errors,
    own_device,
    query_nvidia_smi,
)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ("0, [N/A]; 0, 0; Not Active", GpuErrors()),  # a GPU with row remapping
        ("0, No; [N/A], [N/A]; Not Active", GpuErrors()),  # an older one, which retires pages
        ("3, [N/A]; 0, 0; Not Active", GpuErrors(("3 uncorrectable ECC errors",))),
        ("0, Yes; [N/A], [N/A]; Not Active", GpuErrors(("a retired memory page waits for a reset",))),
        ("0, [N/A]; 1, 0; Not Active", GpuErrors(("a remapped memory row waits for a reset",))),
        ("0, [N/A]; Yes, No; Not Active", GpuErrors(("a remapped memory row waits for a reset",))),
        ("0, [N/A]; 0, 1; Not Active", GpuErrors(("a memory row could not be remapped",))),
        ("0, [N/A]; 0, 0; Active", GpuErrors((), ("a hardware slowdown (temperature or power)",))),
        ("[N/A], [N/A]; [N/A], [N/A]; Active", GpuErrors((), (SLOWDOWN,), "nvidia-smi gives no error counters")),
        (
            "2, [N/A]; exit 2; Not Active",
            GpuErrors(("2 uncorrectable ECC errors",)),
        ),  # a driver without the second query
        ("exit 2; exit 2; exit 2", GpuErrors((), (), "nvidia-smi gives no error counters")),
        ("exit 15; exit 15; exit 15", GpuErrors(("it has fallen off the bus",))),
    ],
)
def test_what_nvidia_smi_says(
    answers: str, expected: GpuErrors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program in its place, which knows the options and fields of the real one's manual."""
    write_nvidia_smi(tmp_path, *answers.split("; "))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert gpu_errors(query_nvidia_smi("0")) == expected


def test_the_newer_name_of_a_slowdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_nvidia_smi(tmp_path, "0, [N/A]", "0, 0", "exit 2", "Active")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert gpu_errors(query_nvidia_smi("0")).warnings == (SLOWDOWN,)


def write_nvidia_smi(folder: Path, ecc: str, rows: str, slowdown: str, newer: str = "exit 2") -> None:
    """An nvidia-smi that prints these lines, or ends with `exit N`."""
    cases = {
        "--query-gpu=ecc.errors.uncorrected.volatile.total,retired_pages.pending": ecc,
        "--query-remapped-rows=remapped_rows.pending,remapped_rows.failure": rows,
        "--query-gpu=clocks_throttle_reasons.hw_slowdown": slowdown,
        "--query-gpu=clocks_event_reasons.hw_slowdown": newer,
    }
    lines = [
        f"{words}) {text if text.startswith('exit') else f'echo {shlex.quote(text)}'};;"
        for words, text in cases.items()
    ]
    (folder / "nvidia-smi").write_text('#!/bin/bash\ncase "$2" in\n' + "\n".join([*lines, "*) exit 2;;", "esac\n"]))
    (folder / "nvidia-smi").chmod(0o755)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "0"),
        ({"LOCAL_RANK": "3"}, "3"),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "4,6"}, "6"),
        ({"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "GPU-1a2b"}, "GPU-1a2b"),
    ],
)
def test_the_device_of_a_process(environ: dict[str, str], expected: str) -> None:
    assert own_device(environ) == expected


def test_only_every_interval_and_warnings_once(capsys: pytest.CaptureFixture[str]) -> None:
    answers, asked = [{ECC: "0", SLOWDOWN: "Active"}] * 2 + [{ECC: "1"}], []

    def query(device: str) -> dict[str, str]:
        asked.append(device)
        return answers.pop(0)

    hook, loop = GpuHealthHook(5, query), SimpleNamespace(step=0)
    hook.on_start(loop)  # type: ignore[arg-type]
    step: Any = SimpleNamespace(number=4)
    hook.on_step(loop, step)  # type: ignore[arg-type]
    assert len(asked) == 1
    step.number = 5
    hook.on_step(loop, step)  # type: ignore[arg-type]
    step.number = 10
    with pytest.raises(UnhealthyGpu, match="1 uncorrectable ECC errors, at step 10") as caught:
        hook.on_step(loop, step)  # type: ignore[arg-type]
    assert caught.value.exit_code == EXIT_HARDWARE
    assert capsys.readouterr().err.count("hardware slowdown") == 1


def test_without_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert query_nvidia_smi("0") is None


def test_gpus_that_cannot_be_read_are_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    hook = GpuHealthHook(1, lambda device: None)
    hook.check(0), hook.check(1)
    assert capsys.readouterr().err.count("hardware errors are not checked: GPU 0 of ") == 1


def test_the_node_is_noted_for_the_job_s_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "gpu-17")
    monkeypatch.setenv("MEGASWIFT_SICK_NODES", str(tmp_path / "sick"))
    with pytest.raises(UnhealthyGpu, match=r"GPU 0 of gpu-17 \(rank 0\): (.|\n)*take node gpu-17 out of service"):
        GpuHealthHook(1, lambda device: {FAILED_ROW: "1"}).check(3)
    assert (tmp_path / "sick").read_text() == "gpu-17\n"
    monkeypatch.setenv("MEGASWIFT_SICK_NODES", str(tmp_path / "no/such/folder"))
    with pytest.raises(UnhealthyGpu):
        GpuHealthHook(1, lambda device: {FAILED_ROW: "1"}).check(3)
