"""Pretraining as users start it: from a config.json alone, on plain text, by the Python API and by the command."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megaswift.trainers.hooks.metrics import read_lines
from tests.sources import ROOT
from tests.trainers.inputs import write_model
from tests.trainers.runs import run

ENVIRON = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")} | {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
}
API = """
import json, sys
from megaswift import SwiftConfig, Trainer
options = json.loads(sys.argv[1])
print(Trainer(options.pop("model"), SwiftConfig(task="pt", **options)).train(dataset=sys.argv[2]).output_dir)
"""


def write_texts(path: Path, rows: int, seed: int) -> list[str]:
    """Words that repeat: something to learn."""
    draw = random.Random(seed)
    texts = [
        " ".join(draw.choice(("abc", "abcd", "xyz", "12")) for _ in range(draw.randint(2, 16))) for _ in range(rows)
    ]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return texts


def empty_model(folder: Path) -> Path:
    """config.json and a tokenizer, no weights."""
    (write_model(folder) / "model.safetensors").unlink()
    return folder


def ran(*words: object, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=ROOT, env=ENVIRON | environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.process
@pytest.mark.slow
def test_from_a_config_alone_by_the_python_api(tmp_path: Path) -> None:
    """The last evaluation is what transformers computes with the export, on documents that end with the end-of-text
    token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, out = empty_model(tmp_path / "model"), tmp_path / "out"
    write_texts(tmp_path / "train.jsonl", 60, 1)
    held = write_texts(tmp_path / "val.jsonl", 7, 2)
    options = {
        "model": str(model),
        "random_init": True,
        "packing": True,
        "max_length": 96,
        "val_dataset": str(tmp_path / "val.jsonl"),
        "dataset_cache_dir": str(tmp_path / "cache"),
        "global_batch_size": 4,
        "max_steps": 12,
        "learning_rate": 1e-2,
        "output_dir": str(out),
        "report_to": "none",
    }
    assert ran("-c", API, json.dumps(options), tmp_path / "train.jsonl").splitlines()[-1] == str(out)
    lines = read_lines(out / "metrics.jsonl")
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"] and all(line["label_tokens"] < line["tokens"] for line in lines)
    trained, tokenizer = AutoModelForCausalLM.from_pretrained(out / "hf"), AutoTokenizer.from_pretrained(out / "hf")
    total = count = 0.0
    for text in held:
        ids = torch.tensor([[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            logprobs = trained(ids).logits[0].log_softmax(-1)
        total, count = total - float(logprobs[:-1].gather(-1, ids[0, 1:, None]).sum()), count + ids.shape[1] - 1
    last = read_lines(out / "eval.jsonl")[-1]
    assert count == last["label_tokens"] and total / count == pytest.approx(last["loss"], rel=1e-5)


@pytest.mark.process
@pytest.mark.slow
def test_a_stream_by_the_command_on_two_processes_is_the_run_on_one(tmp_path: Path) -> None:
    model = empty_model(tmp_path / "model")
    write_texts(tmp_path / "train.jsonl", 60, 1)
    words = (
        "--model",
        model,
        "--random_init",
        "true",
        "--dataset",
        tmp_path / "train.jsonl",
        "--streaming",
        "true",
        "--packing",
        "true",
        "--truncation_strategy",
        "split",
        "--max_length",
        32,
        "--global_batch_size",
        2,
        "--max_steps",
        4,
        "--report_to",
        "none",
        "--export_hf",
        "false",
    )
    ran("-m", "megaswift", "pt", *words, "--output_dir", tmp_path / "one")
    ran("-m", "megaswift", "pt", *words, "--tp", 2, "--output_dir", tmp_path / "two", NPROC_PER_NODE="2")
    one, two = ([line["loss"] for line in read_lines(tmp_path / name / "metrics.jsonl")] for name in ("one", "two"))
    assert len(one) == 4 and two == pytest.approx(one, rel=1e-5)


@pytest.mark.process
def test_a_run_goes_on_under_another_layout_with_the_rows_that_come_next(tmp_path: Path) -> None:
    """From TP2 with two micro-batches a step to two data-parallel ranks with one each: the same documents, tokens and
    losses."""
    model = empty_model(tmp_path / "model")
    write_texts(tmp_path / "train.jsonl", 60, 1)
    words = [
        "--model",
        str(model),
        "--random_init",
        "--dataset",
        str(tmp_path / "train.jsonl"),
        "--packing",
        "--max_length",
        "32",
        "--truncation_strategy",
        "split",
        "--global_batch_size",
        "2",
        "--max_steps",
        "4",
        "--learning_rate",
        "1e-2",
        "--report_to",
        "none",
        "--dataset_cache_dir",
        str(tmp_path / "cache"),
        "--export_hf",
        "false",
    ]
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    run(words, whole, "--tp", 2, "--save_steps", 2, task="pt")
    text = run(words, rest, "--resume_from_checkpoint", whole / "checkpoints" / "step-2", task="pt")
    assert (
        "tensor_parallel_size 2 -> 1" in text
        and "DP2 on 2 processes" in text
        and "the global batch size is" not in text
    )
    want, got = (read_lines(out / "metrics.jsonl")[-2:] for out in (whole, rest))
    for before, after in zip(want, got, strict=True):
        assert all(after[k] == before[k] for k in ("step", "epoch", "tokens", "label_tokens", "learning_rate"))
        assert after["loss"] == pytest.approx(before["loss"], rel=1e-5)
    assert want[0]["loss"] != pytest.approx(want[1]["loss"], rel=1e-3)
