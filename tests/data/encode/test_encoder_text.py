"""Texts, pairs and words of encoders become the tokens, types and lengths that transformers' tokenizer gives.

Covers: megaswift/data/store/cached.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaswift.config import SwiftConfig
from megaswift.data.encode.encoder_text import EncoderTexts, EncoderTokenizer
from megaswift.data.encode.rows import EncodeSpec, encode_spec
from megaswift.data.preference.encode import row_encoder_for_task
from megaswift.data.row_counters import CUT_TEXTS
from megaswift.data.sources.readers import LocatedRow
from megaswift.data.store.cached import token_dependencies
from tests.encoder_folders import KINDS, encoder_config, encoder_tokenizer

TEXTS = ("the red book", "a1 x", "who is good? " * 9, "where", "the book " * 30)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [0, 12])
def test_transformers_gives_the_same(kind: str, most: int) -> None:
    """Of a pair, the longer text is cut first; the special tokens stay."""
    theirs = encoder_tokenizer(kind)
    types = kind == "bert"
    mine = EncoderTokenizer(theirs.backend_tokenizer.to_str(), EncoderTexts(types, most), False)
    pairs = [(a, b) for a in TEXTS for b in TEXTS[::-1]]
    cut = {"truncation": True, "max_length": most} if most else {}
    for texts in (list(TEXTS), pairs):
        found = mine.encode(texts)  # type: ignore[arg-type]
        for text, (ids, mask) in zip(texts, found, strict=True):
            wanted = theirs(*((text,) if isinstance(text, str) else text), **cut)
            assert ids.tolist() == wanted["input_ids"]
            assert mask.tolist() == [t + 1 for t in wanted.get("token_type_ids", [0] * len(ids))]
    whole = [len(theirs(*pair)["input_ids"]) for pair in pairs] + [len(theirs(text)["input_ids"]) for text in TEXTS]
    assert mine.cut == (sum(length > most for length in whole) if most else 0)


def spec_of(folder: Path, task: str, **options: Any) -> EncodeSpec:
    from transformers import AutoTokenizer

    if not folder.is_dir():
        encoder_tokenizer("bert").save_pretrained(folder)
        (folder / "config.json").write_text(encoder_config("bert").to_json_string(use_diff=False))
    data = SwiftConfig(task=task, model=str(folder), num_labels=2, **options).data
    return encode_spec(data, AutoTokenizer.from_pretrained(folder), task)


def encoded(spec: EncodeSpec, *rows: dict[str, Any]) -> Any:
    return row_encoder_for_task(spec).encode(("f", LocatedRow(i, row)) for i, row in enumerate(rows, 1))


def test_rows_of_two_texts_and_what_is_counted(tmp_path: Path) -> None:
    spec = spec_of(tmp_path / "model", "seq_cls", max_length=9, truncation_strategy="right")
    forms = (
        {"text": "red book", "text_pair": "good"},
        {"sentence1": "red book", "sentence2": "good"},
        {"text1": "red book", "text2": "good"},
    )
    found = encoded(spec, *({**form, "label": 1} for form in forms), {"text": "red " * 20, "label": 0})
    first, second, third, long = np.split(found.tokens, np.cumsum(found.lengths)[:-1])
    assert first.tolist() == second.tolist() == third.tolist() and len(long) == 9
    assert found.mask[: len(first)].tolist() == [1, 1, 1, 1, 2, 2]
    assert found.notes[CUT_TEXTS] == 1 and not found.bad
    missing = encoded(spec, {"sentence1": "red", "label": 1})
    assert missing.bad == 1 and "sentence2" in str(missing.problems[0])


def test_a_decoder_refuses_a_second_text(tmp_path: Path) -> None:
    spec = spec_of(tmp_path / "model", "seq_cls")
    (tmp_path / "model/config.json").write_text('{"model_type": "qwen3"}')
    other = spec_of(tmp_path / "model", "seq_cls")
    assert spec.encoder is not None and other.encoder is None
    found = encoded(other, {"text": "red", "text_pair": "book", "label": 1})
    assert found.bad == 1 and "encoders alone" in str(found.problems[0])


def test_a_cached_data_set_has_the_length_of_its_texts(tmp_path: Path) -> None:
    cut, other, whole = (
        token_dependencies(spec_of(tmp_path / "model", "seq_cls", max_length=n, truncation_strategy=how))
        for n, how in ((9, "right"), (8, "right"), (9, "delete"))
    )
    assert cut != other and cut != whole
    json.dumps([cut, other, whole])
