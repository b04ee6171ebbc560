"""A whole run with weights and optimizer states in files on a drive: training, resume, export, LoRA, and the reference
model that is refused.

Slow: DeepSpeed compiles its extension for files at the first use. Skipped where it cannot.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megaswift.config import load_config
from megaswift.errors import ConfigError
from megaswift.run.checks.torch_engine import missing_for_async_io
from megaswift.trainers.hooks.metrics import read_lines
from tests.trainers.inputs import preference_inputs, write_inputs, write_preferences
from tests.trainers.runs import by_torchrun, run

MISSING = missing_for_async_io()
WIDE = {"hidden_size": 256, "intermediate_size": 2304}
"""A matrix of 589,824 elements: half of it, in float32, is more than the 1 MiB from which DeepSpeed writes files."""


def deepspeed_json(folder: Path, device: str) -> str:
    """A file of stage 3 with both parts on a device."""
    section: dict[str, Any] = {"device": device}
    section |= {"nvme_path": str(folder / "drive")} if device == "nvme" else {}
    zero = {"stage": 3, "offload_optimizer": section, "offload_param": section, "sub_group_size": 400_000}
    path = folder / f"{device}.json"
    path.write_text(json.dumps({"zero_optimization": zero}))
    return str(path)


def numbers(out: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in read_lines(out / "metrics.jsonl")]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(bool(MISSING), reason=f"async_io cannot be compiled: {MISSING}")
@pytest.mark.parametrize("more", [(), ("--train_type", "lora")], ids=["full", "lora"])
def test_a_run_equals_cpu_offload(more: tuple[str, ...], tmp_path: Path) -> None:
    """Four steps, and two and two, have the losses, norms and export of CPU offload, bit for bit."""
    words = [*write_inputs(tmp_path, **WIDE), *more, "--report_to", "none", "--save_steps", "2"]
    outs = {name: tmp_path / name for name in ("cpu", "nvme", "parts")}
    run(words, outs["cpu"], "--deepspeed", deepspeed_json(tmp_path, "cpu"), "--max_steps", 4)
    on_drive = ("--deepspeed", deepspeed_json(tmp_path, "nvme"), "--max_steps", 4)
    run(words, outs["parts"], *on_drive, "--exit_interval", 2)
    assert len(numbers(outs["parts"])) == 2
    run(words, outs["parts"], *on_drive, "--resume_from_checkpoint", "latest")
    by_torchrun(words, outs["nvme"], *on_drive)
    assert list((tmp_path / "drive").iterdir()) == [], "of this run, or of the ranks before, which end without clean-up"
    exports = {name: load_file(next(out.glob("*/*model.safetensors"))) for name, out in outs.items()}
    for name in ("nvme", "parts"):
        assert numbers(outs[name]) == numbers(outs["cpu"]) and len(numbers(outs[name])) == 4
        assert exports[name].keys() == exports["cpu"].keys()
        assert [k for k, tensor in exports[name].items() if not torch.equal(tensor, exports["cpu"][k])] == []


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ((), True),
        (("--train_type", "lora"), False),
        (("--train_type", "lora", "--adapters", "A"), True),
        (("--precompute_ref_log_probs", "true"), False),
        (("--reference_free", "true"), False),
    ],
)
def test_a_reference_model_in_files_is_refused(words: tuple[str, ...], refused: bool, tmp_path: Path) -> None:
    write_preferences(tmp_path, 4)
    command = [*preference_inputs(tmp_path, "dpo"), "--deepspeed", deepspeed_json(tmp_path, "nvme"), *words]
    if not refused:
        load_config("dpo", command, environ={})
        return
    with pytest.raises(ConfigError, match="cannot be exchanged for a reference model's") as error:
        load_config("dpo", command, environ={})
    assert len(error.value.problems) == 1
