"""Checkpoints without random states: a resumed run says that it draws other numbers, which is all that differs.

Covers: megaswift/engine/rng_state.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainers.inputs import write_inputs
from tests.trainers.runs import run

pytestmark = pytest.mark.process
TOLD = "has no random states (--save_rng false): they are reseeded"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def export(out: Path) -> dict[str, torch.Tensor]:
    return load_file(next(out.glob("*/*model.safetensors")))


@pytest.mark.parametrize("engine", [("--tp", 1), pytest.param(("--engine", "ddp"), marks=pytest.mark.slow)], ids=str)
def test_a_resumed_run_draws_other_numbers(engine: tuple[str, object], inputs: list[str], tmp_path: Path) -> None:
    """Dropout of steps 3 and 4 is another than in the run without interruption, and the run says so."""
    dropout = ("--train_type", "lora", "--lora_dropout", 0.5, "--lr", 1e-2)
    words = ("--save_steps", 2, "--max_steps", 4, "--report_to", "none", "--no_save_rng", "true", *engine, *dropout)
    whole, again = tmp_path / "whole", tmp_path / "again"
    assert TOLD not in run(inputs, whole, *words)
    step = whole / "checkpoints" / "step-2"
    assert not [*step.rglob("rng-*")] and (step / "engine" / "engine.json").is_file()
    assert TOLD in run(inputs, again, *words, "--resume_from_checkpoint", step)
    before = export(whole)
    assert any(not torch.equal(before[name], tensor) for name, tensor in export(again).items())
