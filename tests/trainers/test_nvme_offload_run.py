"""ZeRO-3 with optimizer states on a drive, here a local folder: the export of a run in host memory, bit for bit.

DeepSpeed compiles its asynchronous reads and writes against libaio and its headers; without them the test is skipped.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megaswift.trainers.metrics_jsonl import read_lines
from tests.trainers.inputs import write_inputs
from tests.trainers.runs import by_torchrun

WIDE = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128}
"""Matrices of 2 MiB: DeepSpeed keeps what is below 1 MiB in memory."""


def can_compile() -> bool:
    """Whether a program can be built against libaio."""
    compiler = shutil.which("g++")
    if compiler is None or find_library("aio") is None:
        return False
    command = [compiler, "-x", "c++", "-fsyntax-only", "-include", "libaio.h", "-"]
    return subprocess.run(command, input="", text=True, capture_output=True).returncode == 0


def settings(device: dict[str, Any]) -> dict[str, Any]:
    return {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": device,
            "offload_param": {"device": "cpu"},
            "stage3_param_persistence_threshold": 0,
        }
    }


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(not can_compile(), reason="needs g++, libaio and its headers")
def test_a_drive_and_host_memory_give_the_same(tmp_path: Path) -> None:
    words, drive = write_inputs(tmp_path, **WIDE), tmp_path / "swap"
    drive.mkdir()
    exports, losses = [], []
    for name, device in (("memory", {"device": "cpu"}), ("drive", {"device": "nvme", "nvme_path": str(drive)})):
        file, out = tmp_path / f"{name}.json", tmp_path / name
        file.write_text(json.dumps(settings(device)))
        by_torchrun(words, out, "--deepspeed", file, "--max_steps", 3, "--report_to", "none", ranks=1)
        exports.append(load_file(out / "hf" / "model.safetensors"))
        losses.append([line["loss"] for line in read_lines(out / "metrics.jsonl")])
    swapped = [path for path in drive.rglob("*.swp") if path.stat().st_size >= 1 << 20]
    assert swapped and sum(path.stat().st_size for path in swapped) > 10 << 20
    assert losses[0] == losses[1] and len(losses[0]) == 3
    assert all(tensor.equal(exports[1][name]) for name, tensor in exports[0].items())
