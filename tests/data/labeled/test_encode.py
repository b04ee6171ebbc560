"""Tokens of labeled rows as transformers' examples make them: of texts with their chat template, and of words with a
label at the first token of each.

Covers: megaswift/data/labeled/encode.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from megaswift.config import SwiftConfig
from megaswift.data.encode.rows import EncodedRows, encode_spec
from megaswift.data.labeled.encode import SMALL, with_spaces
from megaswift.data.preference.encode import row_encoder_for_task
from megaswift.data.sources.readers import LocatedRow
from megaswift.losses.options.classification import MULTI_LABEL
from tests.data.makers import tokenizer

WORDS = ["The", "quick", "brown", "fox", "is", "42", "."]


def encoded(reader: Any, task: str, rows: Sequence[Any], **options: Any) -> EncodedRows:
    data = SwiftConfig(task=task, **{"num_labels": 3, **options}).data
    encoder = row_encoder_for_task(encode_spec(data, reader, task))
    return encoder.encode(("f", LocatedRow(i, row)) for i, row in enumerate(rows, 1))


def split(rows: EncodedRows, flat: np.ndarray) -> list[list[int]]:
    return [part.tolist() for part in np.split(flat, np.cumsum(rows.lengths)[:-1])]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_texts_of_conversations() -> None:
    reader = tokenizer("qwen", "qwen2_5")
    answered = [*user("hello"), {"role": "assistant", "content": "fox"}]
    rows = [
        {"messages": user("hello fox"), "label": 2},
        {"query": "hello", "label": 0, "id": 7},
        {"messages": answered, "label": 1},
    ]
    found = encoded(reader, "seq_cls", rows, system="be quick")
    system = [{"role": "system", "content": "be quick"}]
    texts = [
        reader.apply_chat_template(system + messages, tokenize=False, add_generation_prompt=messages is not answered)
        for messages in (user("hello fox"), user("hello"), answered)
    ]
    assert split(found, found.tokens) == [reader(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert found.values is not None and found.values.tolist() == [[2.0], [0.0], [1.0]]
    assert found.mask.all() and found.first_label == 0 and not found.bad


def test_plain_texts_have_the_tokens_that_the_tokenizer_puts_around_them() -> None:
    reader = tokenizer("llama", "llama3")
    bos, eos = (reader.convert_tokens_to_ids(token) for token in (reader.bos_token, reader.eos_token))
    reader.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{reader.bos_token} $A {reader.eos_token}",
        special_tokens=[(reader.bos_token, bos), (reader.eos_token, eos)],
    )
    rows = [{"text": "hello fox", "label": 1, "label_text": "x"}, {"messages": user("hello"), "label": 2}]
    found = encoded(reader, "seq_cls", rows, use_chat_template=False)
    assert split(found, found.tokens) == [reader(text)["input_ids"] for text in ("hello fox", "hello")]
    assert split(found, found.tokens)[0][0] == bos and split(found, found.tokens)[0][-1] == eos


def test_several_labels_are_one_for_each_class() -> None:
    found = encoded(tokenizer("qwen"), "seq_cls", [{"text": "a", "label": [0, 2]}], problem_type=MULTI_LABEL)
    assert found.values is not None and found.values.tolist() == [[1.0, 0.0, 1.0]]


def test_words_of_a_tokenizer_that_joins_words() -> None:
    """Tokens of a text may reach over words; those of words do not, and are the same text."""
    reader = tokenizer("mistral")
    found = encoded(reader, "token_cls", [{"tokens": WORDS, "tags": [1] * len(WORDS)}])
    ids = found.tokens.tolist()
    assert reader.decode([i for i in ids if i != reader.bos_token_id]).strip() == " ".join(WORDS)
    assert int((found.mask != 0).sum()) == len(WORDS)


@pytest.mark.parametrize("kind", ["qwen", "llama"])
def test_words(kind: str) -> None:
    """As transformers aligns labels with words, on the text that its pipeline sees: words with the spaces between."""
    reader = tokenizer(kind)
    rows = [{"tokens": WORDS, "tags": [0, 1, 2, -100, 1, 0, 2]}, {"tokens": ["fox"], "ner_tags": [1]}]
    found = encoded(reader, "token_cls", rows)
    begin = [reader.bos_token_id] if reader("x")["input_ids"][0] == reader.bos_token_id else []
    assert split(found, found.tokens)[0] == begin + reader(" ".join(WORDS), add_special_tokens=False)["input_ids"]
    encoding = reader(" ".join(WORDS), add_special_tokens=False, return_offsets_mapping=True)
    starts = np.cumsum([0, *(len(word) + 1 for word in WORDS[:-1])])
    wanted = [0] * (len(begin) + len(encoding["input_ids"]))
    for start, tag in zip(starts.tolist(), rows[0]["tags"], strict=True):
        first = next(k for k, (_, stop) in enumerate(encoding["offset_mapping"]) if stop > start)
        wanted[len(begin) + first] = tag + 1 if tag >= 0 else 0
    assert split(found, found.mask)[0] == wanted
    assert sum(value > 0 for value in split(found, found.mask)[1]) == 1 and found.values is None


def test_words_by_transformers_own_alignment(tmp_path: Path) -> None:
    """`is_split_into_words` of a tokenizer that puts spaces itself, and the example's loop over `word_ids`."""
    from transformers import AutoTokenizer

    tokenizer("qwen").save_pretrained(tmp_path)
    reader = AutoTokenizer.from_pretrained(tmp_path)
    from tokenizers import pre_tokenizers

    reader.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tags = [0, 1, 2, 0, 1, 0, 2]
    inputs = reader(WORDS, is_split_into_words=True, add_special_tokens=False)
    labels, before = [], None
    for word in inputs.word_ids():
        labels.append(-100 if word is None or word == before else tags[word])
        before = word
    found = encoded(reader, "token_cls", [{"tokens": WORDS, "tags": tags}])
    assert found.tokens.tolist() == inputs["input_ids"]
    assert found.mask.tolist() == [value + 1 if value >= 0 else 0 for value in labels]


def test_many_classes_do_not_fit_into_a_byte() -> None:
    found = encoded(tokenizer("qwen"), "token_cls", [{"tokens": ["a"], "tags": [SMALL]}], num_labels=SMALL + 1)
    assert found.mask.dtype == np.float32 and found.mask.max() == SMALL + 1
    few = encoded(tokenizer("qwen"), "token_cls", [{"tokens": ["a"], "tags": [SMALL - 1]}], num_labels=SMALL)
    assert few.mask.dtype == np.uint8 and few.mask.max() == SMALL


def test_no_space_between_chinese_words() -> None:
    assert with_spaces(["我", "爱", "Berlin", "和", "你", "。", "x", "y"]) == [
        *("我", "爱", " Berlin", " 和", "你", "。", " x", " y")
    ]


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("seq_cls", {"messages": user("a")}, "f:1: column label: nothing; expected the number of a class, 0 to 2"),
        ("seq_cls", {"messages": user("a"), "label": 3}, "f:1: column label: class 3; expected"),
        ("seq_cls", {"label": 1}, "no format has these columns"),
        ("seq_cls", {"text": 5, "label": 1}, "column text: int 5; expected a string"),
        ("token_cls", {"tokens": ["a"], "tags": [3]}, "f:1: column tags[0]: class 3; expected the number of a class"),
        ("token_cls", {"text": "a", "label": 1}, "column tokens: nothing; expected a list in one of the columns"),
    ],
)
def test_a_row_that_cannot_be_used(task: str, row: dict[str, Any], message: str) -> None:
    found = encoded(tokenizer("qwen", "qwen2_5"), task, [row])
    assert found.bad == 1 and len(found.problems) == 1 and message in str(found.problems[0])
