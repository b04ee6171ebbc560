"""Text as it comes, against the text of all tokens at once."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from megaswift.inference.detokenizer import BROKEN, IncrementalDetokenizer, decode_tokens
from tests.data.makers import TEXT, tokenizer
from tests.trainers.inputs import write_model


def streamed(tokens: Any, text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], IncrementalDetokenizer]:
    stream = IncrementalDetokenizer(tokens, stop)
    pieces = []
    for token in tokens(text, add_special_tokens=False)["input_ids"]:
        pieces.append(stream.add(token))
        if stream.stopped:
            break
    return [*pieces, stream.finish()], stream


@pytest.mark.parametrize("kind", ["qwen", "mistral"])
def test_pieces_are_whole_characters_and_add_up(kind: str) -> None:
    tokens = tokenizer(kind, "qwen2_5" if kind == "qwen" else "mistral")
    for text in [*TEXT[:6], "née 🙂 日本  two  spaces\n\n end "]:
        pieces, stream = streamed(tokens, text)
        assert (
            "".join(pieces) == stream.text == decode_tokens(tokens, tokens(text, add_special_tokens=False)["input_ids"])
        )
        assert not any(BROKEN in p for p in pieces)


def test_a_special_token_between_does_not_eat_the_space_of_the_next(tmp_path: Any) -> None:
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(write_model(tmp_path / "model"))
    ids = [tokens.convert_tokens_to_ids(t) for t in ("a", "<u>", "b", "<u>", "<u>", "c")]
    stream = IncrementalDetokenizer(tokens)
    assert "".join([stream.add(i) for i in ids] + [stream.finish()]) == decode_tokens(tokens, ids)


@pytest.mark.parametrize(
    ("stop", "want"),
    [
        (("the answer",), "Say "),
        (("zzz",), "Say the answer is 42 now"),
        (("42", "is"), "Say the answer "),
        (("now!",), "Say the answer is 42 now"),
        (("now",), "Say the answer is 42 "),
    ],
)
def test_nothing_of_a_stop_text_is_given_out(stop: tuple[str, ...], want: str) -> None:
    pieces, stream = streamed(tokenizer("qwen", "qwen2_5"), "Say the answer is 42 now", stop)
    assert "".join(pieces) == stream.text == want and stream.stopped == (want != "Say the answer is 42 now")


@pytest.mark.parametrize(
    ("stop", "text"),
    [("<|im_end|>", "a b"), (" b<|im_end|>", "a"), ("<|im_end|> c", "a b"), ("im_end", ""), ("<|im_start|>", "")],
)
def test_a_stop_text_may_be_a_special_token_which_no_text_shows(stop: str, text: str) -> None:
    tokens = tokenizer("qwen", "qwen2_5")
    ids = tokens("a b<|im_end|> c", add_special_tokens=False)["input_ids"]
    assert tokens.convert_tokens_to_ids("<|im_end|>") in ids
    pieces, stream = streamed(tokens, "a b<|im_end|> c", (stop,))
    assert (stream.text, stream.stopped) == ((text, True) if text else ("a b c", False))
    assert "".join(pieces) == stream.text


def test_the_letters_of_a_special_token_are_a_stop_text_too() -> None:
    tokens = tokenizer("qwen", "qwen2_5")
    parts = ("a <", "|im_", "end", "|> b")
    stream = IncrementalDetokenizer(tokens, ("<|im_end|>",))
    ids = [token for part in parts for token in tokens(part, add_special_tokens=False)["input_ids"]]
    for token in ids:
        if not stream.stopped:
            stream.add(token)
    assert (stream.text, stream.stopped) == ("a ", True)


def test_an_unfinished_character_at_the_end_is_told_as_such() -> None:
    tokens = tokenizer("qwen", "qwen2_5")
    ids = tokens("日", add_special_tokens=False)["input_ids"]
    assert len(ids) > 1
    stream = IncrementalDetokenizer(tokens)
    assert stream.add(ids[0]) == "" and stream.finish() == BROKEN


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, ids: list[int], **how: Any) -> str:
        return "".join(map(chr, ids))


def spelled(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    stream = IncrementalDetokenizer(Letters(), stop)
    said = ""
    for letter in text:
        said += stream.add(ord(letter))
        if stream.stopped:
            break
    return said + stream.finish(), stream.stopped


def test_an_answer_ends_at_the_first_stop_text_that_is_complete() -> None:
    """Against str.find over every beginning of the text, on random texts of few letters, where stop texts overlap
    themselves and one another."""
    draw = random.Random(3)
    for _ in range(2000):
        text = "".join(draw.choices("ab", k=draw.randint(1, 20)))
        stop = tuple("".join(draw.choices("ab", k=draw.randint(1, 6))) for _ in range(draw.randint(1, 3)))
        ends = [n for n in range(len(text) + 1) if any(s in text[:n] for s in stop)]
        want = text[: min(at for s in stop if (at := text[: ends[0]].find(s)) >= 0)] if ends else text
        assert spelled(text, stop) == (want, bool(ends)), (text, stop)


def test_the_time_for_a_stop_text_is_linear_in_its_length() -> None:
    """A megabyte that the answer keeps repeating took 56 s."""
    answer, stop = "a" * 3000, "a" * (1 << 20) + "b"
    begun = time.process_time()
    assert spelled(answer, (stop, "ab" * 1000, "a" * 2999 + "b")) == (answer, False)
    assert time.process_time() - begun < 5
