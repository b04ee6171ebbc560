"""Checkpoints of weights only: what they hold, what starts from them, and that no run resumes from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megaswift.commands.checkpoint import main
from tests.parity.pool import RankError
from tests.trainers.inputs import write_inputs
from tests.trainers.runs import run

pytestmark = pytest.mark.process
OPTIONS = (
    "--max_steps",
    4,
    "--save_steps",
    2,
    "--report_to",
    "none",
    "--no_save_optim",
    "true",
    "--no_save_rng",
    "true",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize("engine", [("--tp", 2), ("--engine", "ddp")])
def test_steps_are_hugging_face_folders(
    engine: tuple[str, object], inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last one is the export; an earlier one differs, is smaller than a state, and is a model for another run."""
    out = tmp_path / "out"
    run(inputs, out, *OPTIONS, *engine)
    steps = [out / "checkpoints" / f"step-{n}" for n in (2, 4)]
    assert all({p.name for p in step.iterdir()} == {"hf", "manifest.json"} for step in steps)
    assert all(json.loads((step / "manifest.json").read_text())["weights_only"] for step in steps)
    export, earlier, last = (load_file(f / "model.safetensors") for f in (out / "hf", *(s / "hf" for s in steps)))
    assert all(torch.equal(last[name], tensor) for name, tensor in export.items())
    assert any(not torch.equal(earlier[name], tensor) for name, tensor in export.items())
    assert main(["ls", str(out)]) == 0 and capsys.readouterr().out.count("weights only") == 2
    model = inputs.index("--model") + 1
    again = run(
        [*inputs[:model], str(steps[0]), *inputs[model + 1 :]],
        tmp_path / "more",
        "--max_steps",
        1,
        "--report_to",
        "none",
    )
    assert "step 1" in again
    with pytest.raises(
        RankError, match=r"(?s)contains weights only \(--save_only_model\).*--model .*step-4/hf starts from"
    ):
        run(inputs, out, "--max_steps", 6, "--report_to", "none", "--resume_from_checkpoint", "latest", *engine)


def test_steps_of_a_run_with_adapters(inputs: list[str], tmp_path: Path) -> None:
    """They are PEFT folders, from which another run goes on."""
    out = tmp_path / "out"
    run(inputs, out, *OPTIONS, "--train_type", "lora")
    step = out / "checkpoints" / "step-2"
    assert {p.name for p in step.iterdir()} == {"adapter", "manifest.json"}
    more = ("--train_type", "lora", "--adapters", step / "adapter", "--max_steps", 1, "--report_to", "none")
    assert "step 1" in run(inputs, tmp_path / "more", *more)
