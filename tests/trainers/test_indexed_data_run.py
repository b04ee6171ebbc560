"""Pretraining on Megatron-LM's indexed data: from text by `megaswift data index` to losses, against Hugging Face."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from megaswift.cli import main
from megaswift.data.indexed.files import open_indexed_tokens
from megaswift.trainers.hooks.metrics import read_lines
from tests.trainers.inputs import write_model
from tests.trainers.runs import run

LENGTH, EOD = 32, 1
OPTIONS = ("--max_length", LENGTH, "--max_steps", 3, "--global_batch_size", 4, "--learning_rate", "1e-3", "--seed", 5)
RESETS = ("--reset_attention_mask", "true", "--reset_position_ids", "true", "--eod_mask_loss", "true")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A model and the prefix of data that its tokenizer has indexed."""
    folder = tmp_path_factory.mktemp("indexed")
    model, draw = write_model(folder / "model"), random.Random(3)
    lines = ["".join(draw.choice("abc 12") for _ in range(draw.randint(3, 40))) for _ in range(80)]
    (folder / "texts.txt").write_text("\n".join(lines), encoding="utf-8")
    prefix = folder / "corpus"
    words = ["data", "index", str(folder / "texts.txt"), "--model", str(model), "--output", str(prefix)]
    assert main([*words, "--dataset_cache_dir", str(folder / "cache")]) == 0
    tokens = open_indexed_tokens(str(prefix))
    assert tokens.tokens.dtype == "uint16" and len(tokens.lengths) == 80
    assert all(tokens.read(i, int(n) - 1, int(n)).tolist() == [EOD] for i, n in enumerate(tokens.lengths))
    return model, str(prefix)


def losses(model: Path, data: list[str], out: Path, *options: object, ranks: int = 1) -> list[float]:
    words = ["--model", str(model), "--dataset", *data]
    run(words, out, *OPTIONS, "--dataset_cache_dir", out.parent / "cache", *options, ranks=ranks, task="pt")
    return [line["loss"] for line in read_lines(out / "metrics.jsonl") if "loss" in line]


def hugging_face_s(model: Path, prefix: str, resets: bool) -> float:
    """The loss of the first global batch, from Megatron-Core's order as written here for one epoch: documents shuffled,
    laid end to end, samples shuffled."""
    import numpy as np
    from transformers import AutoModelForCausalLM

    tokens = open_indexed_tokens(prefix)
    draw = np.random.RandomState(5)
    documents = np.arange(len(tokens.lengths), dtype=np.int32)
    draw.shuffle(documents)
    whole = np.concatenate([tokens.read(int(d), 0, int(tokens.lengths[d])) for d in documents]).astype(np.int64)
    order = np.arange((len(whole) - 1) // LENGTH, dtype=np.uint32)
    draw.shuffle(order)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    total, count = 0.0, 0
    for sample in order[:4].tolist():
        row = torch.tensor(whole[sample * LENGTH : (sample + 1) * LENGTH + 1])
        inputs, labels = row[:-1], row[1:]
        seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        kept = torch.ones(LENGTH, dtype=torch.bool)
        if resets:
            document = (inputs == EOD).cumsum(0) - (inputs == EOD).long()
            seen &= document[:, None] == document[None]
            kept = inputs != EOD
        mask = torch.zeros(LENGTH, LENGTH, dtype=torch.float64).masked_fill(~seen, float("-inf"))
        logits = network(input_ids=inputs[None], attention_mask=mask[None, None]).logits[0]
        each = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        total, count = total + float(each[kept].sum()), count + int(kept.sum())
    return total / count


@pytest.mark.process
@pytest.mark.parametrize("resets", [False, True])
def test_the_loss_is_hugging_face_s_on_every_layout(resets: bool, corpus: tuple[Path, str], tmp_path: Path) -> None:
    model, prefix = corpus
    more: tuple[object, ...] = RESETS if resets else ()
    want = losses(model, [prefix], tmp_path / "single", *more)
    assert want[0] == pytest.approx(hugging_face_s(model, prefix, resets), rel=2e-6)
    layouts: dict[str, tuple[object, ...]] = {"cp2": ("--cp", 2), "ddp": ("--engine", "ddp")}
    if resets:
        layouts = {"cp2": ("--cp", 2), "pp2": ("--pp", 2)}
    for name, options in layouts.items():
        assert losses(model, [prefix], tmp_path / name, *more, *options, ranks=2) == pytest.approx(want, rel=2e-6), name


@pytest.mark.process
def test_a_blend_resumes_on_other_ranks_and_evaluates(corpus: tuple[Path, str], tmp_path: Path) -> None:
    model, prefix = corpus
    blend = ["0.25", prefix, "0.75", prefix]
    options: tuple[Any, ...] = ("--data_split", "80,20,0", "--eval_steps", 2, "--save_steps", 2)
    want = losses(model, blend, tmp_path / "whole", *options)
    half = tmp_path / "half"
    losses(model, blend, half, *options, "--exit_interval", 2)
    got = losses(model, blend, half, *options, "--resume_from_checkpoint", "latest", ranks=2)
    assert got == pytest.approx(want, rel=2e-6)
    assert (tmp_path / "whole" / "eval.jsonl").exists()
