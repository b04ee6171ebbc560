"""Lines of nvidia-smi, written by hand. A whole run: test_fault_tolerance_run.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megaswift.errors import EXIT_HARDWARE
from megaswift.trainers import gpu_health
from megaswift.trainers.gpu_health import GpuErrors, GpuHealthHook, UnhealthyGpu, gpu_errors, own_device


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("0, No, Not Active", GpuErrors()),
        ("[N/A], [N/A], Not Active", GpuErrors()),
        ("", GpuErrors()),
        ("3, No, Not Active", GpuErrors(("3 uncorrectable ECC errors",))),
        ("0, Yes, Not Active", GpuErrors(("a retired memory page waits for a reset",))),
        ("0, No, Active", GpuErrors((), ("a hardware slowdown (temperature or power)",))),
    ],
)
def test_what_a_line_says(line: str, expected: GpuErrors) -> None:
    assert gpu_errors(line) == expected


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
    lines, asked = ["0, No, Active", "0, No, Active", "1, No, Active"], []

    def query(device: str) -> str:
        asked.append(device)
        return lines.pop(0)

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
    assert gpu_health.query_nvidia_smi("0") is None
