"""Where labels lie in micro-batches: of stored and of streamed rows, cut, packed and held out.

Covers: megaswift/data/labeled/collate.py, megaswift/data/labeled/stream.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.build import build_train_and_eval_sources
from megaswift.losses.contract import Batch
from tests.data.makers import config, jsonl, tokenizer

ROWS = 12
TEXTS = ["fox " * (1 + i % 5) for i in range(ROWS)]


def sources(tmp_path: Path, task: str, **options: Any) -> tuple[Any, Any]:
    if task == "seq_cls":
        rows = [{"text": text, "label": i % 3} for i, text in enumerate(TEXTS)]
        options = {"num_labels": 3, "problem_type": "single_label_classification", **options}
    else:
        rows = [
            {"tokens": text.split(), "tags": [(i + j) % 3 for j in range(len(text.split()))]}
            for i, text in enumerate(TEXTS)
        ]
        options = {"num_labels": 3, **options}
    cfg = config(tmp_path, jsonl(tmp_path / "d.jsonl", rows), task, shuffle=False, **options)
    geometry = LoaderGeometry(per_device=2 if options.get("packing") else 4)
    return build_train_and_eval_sources(cfg.data, cfg.train, tokenizer("qwen"), geometry, task)


def documents(batch: Batch) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """(sample, positions with weight, tokens) of each document with tokens."""
    assert batch.sample_ids is not None
    found = []
    edges = batch.cu_seqlens
    for i, sample in enumerate(batch.sample_ids.tolist()):
        at = (0, slice(int(edges[i]), int(edges[i + 1]))) if edges is not None else (i, slice(None))
        if sample >= 0:
            weights = batch.loss_weights[at][batch.valid[at]]
            found.append((sample, weights, batch.labels[at][batch.valid[at]]))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"packing": True, "max_length": 64},
        {"streaming": True},
        {"streaming": True, "packing": True, "max_length": 64},
        {"truncation_strategy": "right", "max_length": 3},
        {"truncation_strategy": "left", "max_length": 3, "streaming": True},
    ],
    ids=str,
)
def test_labels_of_texts(tmp_path: Path, options: dict[str, Any]) -> None:
    source, _ = sources(tmp_path, "seq_cls", **options)
    seen = set()
    for _ in range(1 if options.get("packing") else 3):
        for batch in source.next():
            labels = batch.fields["label"]
            assert labels.shape == (batch.sample_ids.numel(), 1)
            assert [labels[i, 0] for i, s in enumerate(batch.sample_ids.tolist()) if s >= 0] == [
                s % 3 for s in batch.sample_ids.tolist() if s >= 0
            ]
            for sample, weights, _ in documents(batch):
                assert weights.tolist() == [0.0] * (len(weights) - 1) + [1.0]
                seen.add(sample % ROWS)
    assert seen == {*range(ROWS)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"packing": True, "max_length": 64},
        {"streaming": True},
        {"truncation_strategy": "right", "max_length": 2},
        {"truncation_strategy": "left", "max_length": 5, "streaming": True},
    ],
    ids=str,
)
def test_labels_of_tokens(tmp_path: Path, options: dict[str, Any]) -> None:
    source, _ = sources(tmp_path, "token_cls", **options)
    reader = tokenizer("qwen")
    size = options.get("max_length", 64)
    for _ in range(1 if options.get("packing") else 3):
        for batch in source.next():
            for sample, weights, labels in documents(batch):
                text = TEXTS[sample % ROWS].split()
                whole: list[int | None] = []
                for j, word in enumerate(text):
                    pieces = reader(f" {word}" if j else word)["input_ids"]
                    whole += [(sample % ROWS + j) % 3, *[None] * (len(pieces) - 1)]
                wanted = whole[-size:] if options.get("truncation_strategy") == "left" else whole[:size]
                assert [int(v) if w else None for v, w in zip(labels, weights, strict=True)] == wanted


def test_held_out_rows_keep_their_labels(tmp_path: Path) -> None:
    source, evaluation = sources(tmp_path, "seq_cls", split_dataset_ratio=0.34)
    samples = set()
    for batches in (source.next(), *evaluation.eval_batches()):
        for batch in batches:
            kept = [(s, float(v)) for s, v in zip(batch.sample_ids.tolist(), batch.fields["label"][:, 0], strict=True)]
            assert all(v == (s % 3 if s >= 0 else 0) for s, v in kept)
            samples |= {s for s, _ in kept if s >= 0}
    assert len(samples) >= 8


def test_one_token_is_a_text_with_a_label(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Labels that are no next tokens need no second token."""
    reader = tokenizer("qwen")
    data = jsonl(tmp_path / "d.jsonl", [{"text": "a", "label": i % 3} for i in range(4)])
    cfg = config(tmp_path, data, "seq_cls", num_labels=3, problem_type="single_label_classification")
    source, _ = build_train_and_eval_sources(cfg.data, cfg.train, reader, LoaderGeometry(per_device=4), "seq_cls")
    assert "without" not in capsys.readouterr().err and source.stats["label_tokens"] == 4
