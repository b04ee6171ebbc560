"""Tokens of plain texts and chats: those that transformers' tokenizer of the same files gives."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from megaswift.config import SwiftConfig
from megaswift.data.encode.rows import RowEncoder, encode_spec
from tests.data.makers import EOS, _backend, template


def beginning(kind: str, **options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer that puts <bos> before each text, as those of Llama, Gemma and Mistral do."""
    backend = Tokenizer.from_str(_backend(kind))
    backend.add_special_tokens(["<bos>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", backend.token_to_id("<bos>"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token=EOS[kind], **options)


def tokens(tokenizer: Any, row: dict[str, Any], task: str) -> tuple[list[int], list[int]]:
    encoder = RowEncoder(encode_spec(SwiftConfig(dataset=["x"]).data, tokenizer, task))
    ids, mask = next(iter(encoder.tokenize([encoder.render(row)])))
    return ids.tolist(), mask.tolist()


@pytest.mark.parametrize("kind", ["qwen", "mistral", "llama"])
@pytest.mark.parametrize("text", ["hello world, how are you", " hello", "\n", "日本語🙂"])
def test_a_document_has_the_token_that_the_tokenizer_puts_before_a_text(kind: str, text: str) -> None:
    tokenizer = beginning(kind)
    wanted = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    ids, mask = tokens(tokenizer, {"text": text}, "pt")
    assert ids == wanted and ids[0] == tokenizer.bos_token_id
    assert mask == [0] + [1] * (len(ids) - 1)
    prompted, _ = tokens(tokenizer, {"prompt": text, "completion": "x"}, "sft")
    assert prompted[: len(ids) - 2] == ids[: len(ids) - 2], "pt and plain text in sft begin alike"


def test_a_document_that_brings_the_token_along_has_it_once() -> None:
    tokenizer = beginning("qwen")
    assert tokens(tokenizer, {"text": "<bos>hello"}, "pt")[0] == tokens(tokenizer, {"text": "hello"}, "pt")[0]


def test_special_tokens_in_a_text_are_split_where_the_tokenizer_splits_them() -> None:
    tokenizer = beginning("qwen", split_special_tokens=True)
    tokenizer.chat_template = template("qwen2_5")
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
    ids, mask = tokens(tokenizer, {"messages": messages}, "sft")
    assert ids == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in ids and any(mask)
    text = "a <|im_start|> b"
    assert tokens(tokenizer, {"text": text}, "pt")[0] == [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
