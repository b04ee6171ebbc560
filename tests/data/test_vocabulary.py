"""Tokens that were added to the tokenizer and not to the model: told with their row, whether data are stored or
streamed.

Covers: megaswift/data/tokenizer.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaswift.data.batches.collate import PaddingShape
from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.build import build_train_and_eval_sources, padding_shape_of
from megaswift.data.preference.collate import PreferenceCollator, PreferenceUnit
from megaswift.data.tokenizer import padding_token_of
from megaswift.data.vocabulary import check_batch_token_ids
from megaswift.errors import DataError
from tests.data.makers import chat, config, jsonl, tokenizer


def grown(*tokens: str) -> tuple[Any, int]:
    """(tokenizer with more tokens than the model, rows of the model's embedding)."""
    made = tokenizer("qwen", "qwen2_5")
    rows = len(made)
    made.add_tokens(list(tokens))
    return made, rows


def source(tmp_path: Path, answers: list[str], **options: Any) -> Any:
    path = jsonl(tmp_path / "d.jsonl", [chat("q", answer) for answer in answers])
    cfg = config(tmp_path, options.pop("dataset", path), **options)
    made, rows = grown("<extra>")
    return build_train_and_eval_sources(cfg.data, cfg.train, made, LoaderGeometry(vocabulary=rows))[0]


@pytest.mark.parametrize("options", [{}, {"packing": True}, {"split_dataset_ratio": 0.5}], ids=str)
def test_stored_rows_are_named_with_file_and_line(tmp_path: Path, options: dict[str, Any]) -> None:
    _, rows = grown()
    with pytest.raises(
        DataError, match=rf"d.jsonl:3: token {rows} \(<extra>\) is out of range: the model's embedding has {rows} rows"
    ):
        source(tmp_path, ["a", "b", "c <extra> d", "e"], **options)
    assert source(tmp_path, ["a", "b", "c", "d"], **options) is not None


def test_evaluation_s_rows_too(tmp_path: Path) -> None:
    held = jsonl(tmp_path / "v.jsonl", [chat("q", "x <extra>")])
    for options in ({}, {"streaming": True}):
        with pytest.raises(DataError, match=r"v.jsonl:1: token \d+ \(<extra>\)"):
            source(tmp_path, ["a"], val_dataset=[held], **options)


@pytest.mark.parametrize("packing", [False, True])
def test_a_stream_stops_at_the_row_with_its_position_kept(tmp_path: Path, packing: bool) -> None:
    rows = source(
        tmp_path, ["a", "b", "c", "d <extra>"], streaming=True, shuffle=False, packing=packing, max_length=128
    )
    before, seen = rows.state_dict(), 0
    with pytest.raises(DataError, match=r"row 4: token \d+ is out of range"):
        while seen < 4:
            before = rows.state_dict()
            seen += len(rows.next())
    assert rows.state_dict() == before


def test_a_shared_prompt_is_of_the_first_row_that_has_it() -> None:
    """Streams look at collated batches, in which a prompt that a pair shares is a document of no row."""
    mask = np.array([0, 0, 0, 1], dtype=np.uint8)
    pairs = [[(np.array([first, 2, 3, answer], dtype=np.int32), mask, row) for answer in (4, 5)] for row, first in
             ((6, 1), (7, 99))]  # fmt: skip
    collator = PreferenceCollator(2, True, False, shares_prefixes=True)
    (batch,) = collator.batches([[PreferenceUnit(pair, 0.0) for pair in pairs]], PaddingShape(), False)
    assert batch.sample_ids is not None and batch.sample_ids.tolist() == [-1, 6, 6, -1, 7, 7]
    with pytest.raises(DataError, match=r"row 8: token 99 is out of range"):
        check_batch_token_ids(batch, 50)


def test_rows_are_filled_up_with_a_token_that_the_model_has() -> None:
    made, rows = grown("<fill>")
    made.pad_token = "<fill>"
    assert padding_token_of(made) == rows
    assert padding_shape_of(made, LoaderGeometry(vocabulary=rows)).pad_id == made.eos_token_id
    assert padding_shape_of(made, LoaderGeometry(vocabulary=rows + 1)).pad_id == rows
    made.eos_token = "<fill>"
    assert padding_token_of(made, rows) == 0
