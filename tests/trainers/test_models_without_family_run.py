"""Models that documents name and that are no family here, without an engine option: the engine is chosen, preflight
passes, and the export has the weights of transformers' own class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megaswift.config import load_config
from megaswift.run.checks.engine_choice import resolve_engine
from megaswift.run.checks.preflight import preflight
from megaswift.trainers.hooks.metrics import read_lines
from tests.data import makers
from tests.engine.torch.other_models import write
from tests.parity import vision
from tests.run.test_training import run
from tests.trainers.inputs import write_conversations


@pytest.fixture
def inputs(tmp_path: Path) -> list[str]:
    """Llama4ForCausalLM with a window, a layer without rotary positions, experts and a dense layer."""
    model = write("llama4_text", tmp_path / "model", vocab=1024)
    makers.tokenizer("qwen", "qwen3").save_pretrained(model)
    data = write_conversations(tmp_path / "data.jsonl", 8)
    return ["--model", str(model), "--dataset", str(data), "--dataset_cache_dir", str(tmp_path / "cache")]


def test_a_torch_engine_without_being_asked(inputs: list[str], tmp_path: Path, capsys: Any) -> None:
    cfg = load_config("sft", [*inputs, "--output_dir", str(tmp_path / "out")], environ={})
    cfg = resolve_engine(cfg, 1)
    assert cfg.engine.engine == "ddp"
    text = "".join(capsys.readouterr())
    assert "engine ddp: the native engine does not support model_type llama4_text" in text
    preflight(cfg, 1)


@pytest.mark.process
@pytest.mark.slow
def test_llama4_text_from_start_to_export(inputs: list[str], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Llama4ForCausalLM

    out = tmp_path / "out"
    run(inputs, out, "--max_steps", 2, "--lr", "1e-2", "--report_to", "none")
    assert len(read_lines(out / "metrics.jsonl")) == 2
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "model", out / "hf"))
    assert isinstance(after, Llama4ForCausalLM) and after.config.model_type == "llama4_text"
    own = dict(before.named_parameters())
    changed = [name for name, p in after.named_parameters() if not torch.equal(p, own[name])]
    assert {"experts", "router", "q_proj", "lm_head"} <= {part for name in changed for part in name.split(".")}


@pytest.mark.process
@pytest.mark.slow
def test_internvl_from_start_to_export(tmp_path: Path) -> None:
    """With images, and without torchvision, which its processor for videos asks for."""
    from transformers import AutoModelForImageTextToText, InternVLForConditionalGeneration

    model, data = vision.write_model("internvl", tmp_path / "model"), vision.write_rows(tmp_path / "data.jsonl", 8)
    inputs = ["--model", str(model), "--dataset", str(data), "--dataset_cache_dir", str(tmp_path / "cache")]
    out = tmp_path / "out"
    text = run(inputs, out, "--max_steps", 2, "--lr", "1e-2", "--report_to", "none")
    assert "engine ddp: the native engine does not support model_type internvl" in text
    before, after = (AutoModelForImageTextToText.from_pretrained(folder) for folder in (model, out / "hf"))
    assert isinstance(after, InternVLForConditionalGeneration)
    own = dict(before.named_parameters())
    changed = {name.split(".")[1] for name, p in after.named_parameters() if not torch.equal(p, own[name])}
    assert "language_model" in changed and read_lines(out / "metrics.jsonl")[-1]["loss"] > 0
