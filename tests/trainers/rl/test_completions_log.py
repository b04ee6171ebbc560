"""Lines of completions.jsonl: the tokens of some completions, with what training reads of each."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from megaswift.inference.token_texts import TokenTexts
from megaswift.rollout.sampler import Completion
from megaswift.trainers.hooks.metrics import read_lines
from megaswift.trainers.rl.completions_log import CompletionsLog, token_fields, token_texts
from megaswift.trainers.rl.multi_turn import MultiTurnCompletion
from tests.inference.test_token_texts import TEXT, byte_fallback, byte_level
from tests.trainers.rl.makers import source


def tokenizer(make: Any = byte_level) -> PreTrainedTokenizerFast:
    tokens = PreTrainedTokenizerFast(tokenizer_object=make(), unk_token="<unk>")
    tokens.add_special_tokens({"eos_token": "<|end|>"})
    return tokens


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_texts_joined_are_the_completion_with_its_end(make: Any) -> None:
    """A character of several tokens stands at the first of them, whole."""
    tokens = tokenizer(make)
    ids = [*tokens(TEXT, add_special_tokens=False)["input_ids"], tokens.eos_token_id]
    found = token_texts(ids, TokenTexts(tokens))
    assert len(found) == len(ids) and "".join(found) == TEXT + "<|end|>"
    assert found[found.index("日") + 1 :][:2] == ["", ""]


def test_a_character_that_is_never_finished() -> None:
    tokens = tokenizer()
    ids = tokens("ab日", add_special_tokens=False)["input_ids"][:-1]
    assert token_texts(ids, TokenTexts(tokens)) == ["a", "b", "\ufffd", ""]


def test_numbers_of_each_token() -> None:
    tokens = tokenizer()
    ids = tuple(tokens("abc", add_special_tokens=False)["input_ids"])
    answer = Completion(ids, (-0.12345, -2.0, float("nan")), True)
    alike = token_fields(answer, np.full(3, 0.5, dtype=np.float32), TokenTexts(tokens))
    assert alike == {"token_texts": ["a", "b", "c"], "token_logprobs": [-0.123, -2.0, None]}, "one advantage for all"
    each = token_fields(answer, np.asarray([0.5, 0.25, -1.0], dtype=np.float32), TokenTexts(tokens))
    assert each["token_advantages"] == [0.5, 0.25, -1.0]
    assert "token_advantages" not in token_fields(answer, np.zeros(0), TokenTexts(tokens)), "not trained on"


def test_what_an_environment_wrote_has_no_numbers() -> None:
    tokens = tokenizer()
    ids = tuple(tokens("abc", add_special_tokens=False)["input_ids"])
    talk = MultiTurnCompletion(ids, (-1.0, -2.0), True, own=(True, False, True))
    found = token_fields(talk, np.asarray([0.5, 1.0]), TokenTexts(tokens))
    assert found["token_logprobs"] == [-1.0, None, -2.0] and found["token_advantages"] == [0.5, None, 1.0]


def test_the_first_completions_of_a_generation_have_tokens(tmp_path: Path) -> None:
    made = source()
    made.next()
    record = CompletionsLog(tmp_path / "completions.jsonl", made, None, 3, tokenizer())
    loop: Any = None
    record.on_step(loop, SimpleNamespace(number=4))  # type: ignore[arg-type]
    found = read_lines(tmp_path / "completions.jsonl")
    assert ["token_texts" in line for line in found] == [True] * 3 + [False] * 5
    assert [len(line["token_texts"]) for line in found[:3]] == [line["tokens"] for line in found[:3]]


def test_bytes_of_a_token_are_as_many_as_the_option_says() -> None:
    """Some 20 in words of ordinary length, 30 where each token has an advantage of its own."""
    tokens = tokenizer()
    words = "".join(chr(ord("a") + i % 26) for i in range(400)).encode()
    ids = tuple(tokens(words.decode(), add_special_tokens=False)["input_ids"])
    draws = np.random.default_rng(0).normal(size=len(ids)) * 3
    answer = Completion(ids, tuple(-abs(draws)), True)
    alike = token_fields(answer, np.zeros(len(ids)), TokenTexts(tokens))
    each = token_fields(answer, draws, TokenTexts(tokens))
    text = 4  # bytes of a token's own text in English, against one here
    assert len(json.dumps(alike)) / len(ids) + text - 1 < 20 < len(json.dumps(each)) / len(ids) + text - 1 < 30
