"""Runs in float16 on every engine: from a loss scale that overflows, over a checkpoint, to the export.

Covers: megaswift/engine/torch/checkpoint.py, megaswift/trainers/loop.py.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megaswift.trainers.hooks.metrics import read_lines
from tests.trainers.inputs import write_inputs
from tests.trainers.runs import run
from tests.trainers.test_engines_run import near

pytestmark = pytest.mark.process
STEPS, HALF = 20, 10
WORDS = (
    *("--fp16", "true", "--initial_loss_scale", 2**22, "--hysteresis", 1, "--loss_scale_window", 3),
    *("--max_steps", STEPS, "--save_steps", HALF, "--report_to", "none", "--adam_epsilon", "1e-6"),
)
SLOW = ("megatron", "fsdp2", "zero0", "zero2", "zero3")
ENGINES = ("ddp", *(pytest.param(engine, marks=pytest.mark.slow) for engine in SLOW))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_inputs(tmp_path_factory.mktemp("inputs"), "1e-3")


def lines(out: Path) -> list[dict[str, Any]]:
    """What does not depend on the clock."""
    names = ("step", "loss", "grad_norm", "learning_rate", "loss_scale", "skipped")
    return [{k: line.get(k) for k in names} for line in read_lines(out / "metrics.jsonl")]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_scale_that_overflows_at_first(engine: str, inputs: list[str], tmp_path: Path) -> None:
    if engine.startswith("zero") and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        pytest.skip("DeepSpeed does not run float16 on this CPU")
    whole, again = tmp_path / "whole", tmp_path / "again"
    text = run(inputs, whole, *WORDS, "--engine", engine, ranks=1)
    assert "a gradient overflows float16; the loss scale is lowered" in text
    found = lines(whole)
    scale, good, skipped = 2.0**22, 0, 0
    for line in found:  # the rule, from the skipped steps alone
        assert line["loss_scale"] == scale
        skips = bool(line["skipped"])
        good = 0 if skips else good + 1
        scale *= 0.5 if skips else 2.0 if good == 3 else 1.0
        good %= 3
        skipped += skips
    assert 2 < skipped < STEPS - 2

    taken = [line["learning_rate"] for line in found if not line["skipped"]]
    cosine = [1e-3 * (1 + math.cos(math.pi * k / STEPS)) / 2 for k in range(len(taken))]
    assert taken == pytest.approx(cosine), "a skipped step does not move the schedule"

    step = whole / "checkpoints" / f"step-{HALF}"
    run(inputs, again, *WORDS, "--engine", engine, "--resume_from_checkpoint", step, ranks=1)
    assert lines(again) == found[HALF:], "the scale and its counters go on"
    weights = [load_file(out / "hf" / "model.safetensors") for out in (whole, again)]
    assert near(*weights) == 0
