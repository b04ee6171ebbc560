"""Rows of a stream that are too long: what each strategy leaves of them is what it leaves of stored rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.build import build_train_and_eval_sources, load_document_splits
from megaswift.errors import DataError
from tests.data.makers import chat, config, jsonl, tokenizer

ROWS = 6


def written(tmp_path: Path, task: str) -> str:
    """Rows of which every second one is long."""
    texts = [f"{i} " + "hello world my friend " * (12 if i % 2 else 1) for i in range(ROWS)]
    return jsonl(tmp_path / "d.jsonl", [chat("q", text) if task == "sft" else {"text": text} for text in texts])


def streamed(tmp_path: Path, task: str, **options: Any) -> Any:
    cfg = config(tmp_path, written(tmp_path, task), task, streaming=True, shuffle=False, **options)
    return build_train_and_eval_sources(cfg.data, cfg.train, tokenizer("qwen", "qwen2_5"), LoaderGeometry(), task)[0]


def stored(tmp_path: Path, task: str, **options: Any) -> list[tuple[list[int], list[int]]]:
    """Tokens and mask of each document."""
    cfg = config(tmp_path, written(tmp_path, task), task, **options)
    docs, _ = load_document_splits(cfg.data, cfg.train, tokenizer("qwen", "qwen2_5"), task)
    return [(ids.tolist(), mask.tolist()) for ids, mask in map(docs.read, range(len(docs)))]


@pytest.mark.parametrize("strategy", ["left", "right", "delete"])
def test_cut_and_deleted_rows(strategy: str, tmp_path: Path) -> None:
    options = {"max_length": 100, "truncation_strategy": strategy}
    want = stored(tmp_path, "sft", **options)
    rows, found = streamed(tmp_path, "sft", **options), []
    for _ in range(ROWS):
        [b] = rows.next()
        n = int(b.valid.sum())
        assert b.valid[0, :n].all() or n == 0
        found += [(b.input_ids[0, :n].tolist(), b.loss_weights[0, :n].int().tolist())] * bool(n)
    assert [ids for ids, _ in found] == [ids for ids, _ in want]
    assert [weights for _, weights in found] == [[*mask[1:], 0] for _, mask in want]
    assert len(want) == (ROWS // 2 if strategy == "delete" else ROWS) and max(len(ids) for ids, _ in want) <= 100


def test_split_texts_in_packed_rows(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_length": 16, "truncation_strategy": "split", "packing": True}
    want = [ids for ids, _ in stored(tmp_path, "pt", **options)]
    rows = streamed(tmp_path, "pt", **options)
    found: list[list[int]] = []
    while len(found) < len(want):
        [b] = rows.next()
        ends = b.cu_seqlens.tolist()
        found += [
            b.input_ids[0, start:stop][b.valid[0, start:stop]].tolist()
            for start, stop in zip(ends[:-1], ends[1:], strict=True)
        ]
    assert sorted(found) == sorted(want) and len(want) > 2 * ROWS


def test_a_row_that_may_not_be_long_stops_the_run(tmp_path: Path) -> None:
    rows = streamed(tmp_path, "sft", max_length=100, truncation_strategy="raise")
    rows.next()
    before = rows.state_dict()
    with pytest.raises(DataError, match=r"row 2: \d+ tokens, --max_length is 100"):
        rows.next()
    assert rows.state_dict() == before
