"""A run from a converted checkpoint, and any step of a run as a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megaswift.bridge.convert.to_hf import megatron_to_hf
from megaswift.bridge.convert.to_megatron import hf_to_megatron
from megaswift.config import SwiftConfig
from megaswift.errors import WeightsError
from megaswift.folders.source import locate_model, missing_model_file_problems
from megaswift.trainers.hooks.metrics import read_lines
from tests.bridge.folders import tensors_of
from tests.bridge.test_convert import assert_same
from tests.trainers.inputs import write_conversations, write_model
from tests.trainers.runs import run


def train(model: Path, folder: Path, out: Path) -> list[float]:
    """Two steps; their losses."""
    words = [
        "--model",
        model,
        "--dataset",
        folder / "data.jsonl",
        "--dataset_cache_dir",
        folder / "cache",
        "--max_steps",
        2,
        "--save_steps",
        1,
        "--per_device_train_batch_size",
        4,
        "--lr",
        1e-3,
    ]
    run([str(word) for word in words], out, ranks=1)
    return [line["loss"] for line in read_lines(out / "metrics.jsonl")]


@pytest.mark.process
def test_a_run_from_a_checkpoint_and_its_steps_as_folders(tmp_path: Path) -> None:
    """The same losses as from the folder; with the folder gone, the run's latest step is what it exported, tokenizer
    included."""
    folder = write_model(tmp_path / "model")
    write_conversations(tmp_path / "data.jsonl")
    hf_to_megatron(folder, tmp_path / "m")
    want = train(folder, tmp_path, tmp_path / "a")
    shutil.rmtree(folder)
    assert train(tmp_path / "m", tmp_path, tmp_path / "b") == want
    shutil.rmtree(tmp_path / "m")
    for out in (tmp_path / "a", tmp_path / "b"):
        megatron_to_hf(out, out / "latest")
        assert_same(tensors_of(out / "latest"), tensors_of(out / "hf"))
        files = {p.name: p.read_bytes() for p in (out / "hf").iterdir() if p.suffix in (".json", ".jinja")}
        assert {
            p.name: p.read_bytes() for p in (out / "latest").iterdir() if p.suffix in (".json", ".jinja")
        } == files and len(files) > 3
        megatron_to_hf(out / "checkpoints" / "step-1", out / "first")
        first, last = tensors_of(out / "first"), tensors_of(out / "latest")
        assert first.keys() == last.keys() and any(not first[n].equal(last[n]) for n in first)


def test_where_a_checkpoint_is_accepted(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    checkpoint = hf_to_megatron(folder, tmp_path / "m")
    found = locate_model(SwiftConfig(model=str(checkpoint)).model)
    assert found == checkpoint / "model" and missing_model_file_problems(found, False) == []
    assert json.loads((found / "config.json").read_text())["model_type"] == "qwen3"
    shutil.rmtree(found)
    with pytest.raises(WeightsError, match="is a checkpoint without"):
        locate_model(SwiftConfig(model=str(checkpoint)).model)
