"""Bytes of tokens against the text of all tokens at once, for the kinds of tokenizers that write text differently."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megaswift.inference.detokenizer import IncrementalDetokenizer, decode_tokens
from megaswift.inference.token_texts import TokenTexts

TEXT = "Say the answer is 42 now. née 🙂 日本  two  spaces\n\n end <tool> x <|im|> y"


def byte_level() -> Tokenizer:
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokens.train_from_iterator([TEXT[:25]] * 5, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    return tokens


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Gemma have it: characters that the vocabulary lacks are `<0xE6>` and so on."""
    tokens = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokens.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokens.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens.train_from_iterator([TEXT[:25]] * 5, trainers.BpeTrainer(vocab_size=330, special_tokens=special))
    stored = json.loads(tokens.to_str())
    stored["added_tokens"] = [token for token in stored["added_tokens"] if token["content"] == "<unk>"]
    return Tokenizer.from_str(json.dumps(stored))


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_the_bytes_of_an_answer_s_tokens_joined_are_its_text(make: Any) -> None:
    tokens = PreTrainedTokenizerFast(tokenizer_object=make(), unk_token="<unk>")
    tokens.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    tokens.add_special_tokens({"additional_special_tokens": ["<|im|>"]})
    ids = tokens(TEXT, add_special_tokens=False)["input_ids"]
    texts, stream, joined = TokenTexts(tokens), IncrementalDetokenizer(tokens), []
    for token in ids:
        joined.append(texts.utf8(token, stream.blank))
        stream.add(token)
    assert b"".join(joined).decode() == decode_tokens(tokens, ids)
    assert b"\xe6" in joined and b"<tool>" in joined  # the first byte of a character alone
    special = tokens.convert_tokens_to_ids("<|im|>")
    assert (texts.utf8(special), texts.text(special)) == (b"", "<|im|>")


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_the_places_of_a_prompt_s_tokens_are_those_in_its_text(make: Any) -> None:
    """The oracle is the tokenizers library's own offsets; a part of a character is at that character."""
    tokens = PreTrainedTokenizerFast(tokenizer_object=make(), unk_token="<unk>")
    tokens.add_special_tokens({"additional_special_tokens": ["<|im|>"]})
    encoded = tokens(TEXT, add_special_tokens=False, return_offsets_mapping=True)
    found = TokenTexts(tokens).starts(encoded["input_ids"], TEXT)
    wrong = [
        (start, span)
        for start, span in zip(found, encoded["offset_mapping"], strict=True)
        if not span[0] <= start <= span[1]
    ]
    assert not wrong and found[0] == 0 and found[-1] >= len(TEXT) - 2


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_a_row_beyond_the_vocabulary_has_a_number_and_no_bytes(make: Any) -> None:
    tokens = PreTrainedTokenizerFast(tokenizer_object=make(), unk_token="<unk>")
    texts = TokenTexts(tokens)
    beyond = len(tokens) + 3
    assert texts.text(beyond) == f"<|token_{beyond}|>"
    assert texts.utf8(beyond) == b""
