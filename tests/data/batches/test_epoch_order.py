"""Rows grouped by length: transformers' sampler is the oracle; resumes and ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import trainer_pt_utils

from megaswift.data.batches.epoch_order import EpochOrder, group_by_length
from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.build import build_train_and_eval_sources
from megaswift.errors import DataError
from tests.data.makers import chat, config, jsonl, tokenizer


@pytest.mark.parametrize(("rows", "batch"), [(1, 1), (3, 4), (40, 4), (1000, 4), (997, 3), (5000, 8)])
@pytest.mark.parametrize("distinct", [3, 500])
def test_the_order_is_transformers(rows: int, batch: int, distinct: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same permutation and lengths, ties included."""
    draw = np.random.default_rng(rows)
    lengths, order = draw.integers(1, distinct, rows), draw.permutation(rows)
    monkeypatch.setattr(trainer_pt_utils.torch, "randperm", lambda n, generator=None: torch.from_numpy(order))
    expected = trainer_pt_utils.get_length_grouped_indices(lengths.tolist(), batch)
    grouped = group_by_length(order.copy(), lengths, batch)
    assert grouped.tolist() == expected and sorted(expected) == [*range(rows)]
    assert EpochOrder(rows, True, 7, lengths, batch).epoch(2).tolist() != EpochOrder(rows, True, 7).epoch(
        2
    ).tolist() or (rows <= 3)


def source(folder: Path, geometry: LoaderGeometry, task: str = "sft", **options: Any) -> Any:
    path = folder / f"{task}.jsonl"
    if not path.exists():
        texts = ["answer " * (1 + i * 7 % 31) for i in range(60)]
        more = {"rejected_response": "no " * 5} if task == "dpo" else {}
        jsonl(path, [chat(f"hello {i}", text) | more for i, text in enumerate(texts)])
    cfg = config(folder, str(path), task=task, **options)
    return build_train_and_eval_sources(cfg.data, cfg.train, tokenizer("qwen", "qwen2_5"), geometry, task)[0]


def taken(steps: int, *ranks: Any) -> list[int]:
    """Samples in the order of global batches, over all data-parallel ranks."""
    found = []
    for _ in range(steps):
        parts = [rank.next() for rank in ranks]
        for micro in zip(*parts, strict=True):
            found += [int(i) for batch in micro for i in batch.sample_ids]
    return found


def padding(source: Any, steps: int) -> int:
    return sum(int((~batch.valid).sum()) for _ in range(steps) for batch in source.next())


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_batches_have_rows_of_similar_length(tmp_path: Path, task: str) -> None:
    """One epoch has each row once, with a fraction of the padding, the longest row first."""
    options = {"packing": False} if task == "dpo" else {}
    mixed, grouped = (
        source(tmp_path, LoaderGeometry(0, 1, 4), task, group_by_length=g, **options) for g in (False, True)
    )
    assert padding(grouped, 15) < 0.7 * padding(mixed, 15)
    again = source(tmp_path, LoaderGeometry(0, 1, 4), task, group_by_length=True, **options)
    samples = taken(15, again)
    assert sorted({*samples}) == [*range(60)] and samples[0] % 31 == max(range(31), key=lambda i: i * 7 % 31)


@pytest.mark.parametrize("threads", [0, 2])
def test_ranks_and_resumes_see_the_same_rows(tmp_path: Path, threads: int) -> None:
    """Two ranks take the rows of one; a resume goes on, with larger steps too."""
    options = {"group_by_length": True, "dataloader_num_workers": threads}
    whole = taken(30, source(tmp_path, LoaderGeometry(0, 1, 4, 1), **options))
    assert taken(30, *(source(tmp_path, LoaderGeometry(r, 2, 2, 1), **options) for r in range(2))) == whole
    first = source(tmp_path, LoaderGeometry(0, 1, 4, 1), **options)
    taken(7, first)
    second = source(tmp_path, LoaderGeometry(0, 1, 4, 1), **options)
    second.load_state_dict(first.state_dict())
    assert taken(23, second) == whole[28:]
    larger = [source(tmp_path, LoaderGeometry(r, 2, 4, 1), **options) for r in range(2)]
    for rank in larger:
        rank.load_state_dict(first.state_dict())
    assert taken(11, *larger) == whole[28:116]
    third = source(tmp_path, LoaderGeometry(0, 1, 4, 1), **options)
    third.load_state_dict(larger[0].state_dict())
    assert taken(1, third) == whole[116:120]


def test_a_run_that_did_not_group_is_not_resumed_with_it(tmp_path: Path) -> None:
    first, second = (source(tmp_path, LoaderGeometry(0, 1, 4), group_by_length=g) for g in (False, True))
    with pytest.raises(DataError, match="--group_by_length was False in the checkpoint, but is True now"):
        second.load_state_dict(first.state_dict())
    old = {k: v for k, v in first.state_dict().items() if not k.startswith("group")}
    dataclasses.replace(first).load_state_dict(old)
