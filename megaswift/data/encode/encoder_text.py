"""Tokenizes texts, pairs of texts and words for encoders: the tokenizer puts its own special tokens around them, and
cuts them to a length.

Owns what a mask holds for such texts: 1 for the tokens of a text, or of the first of a pair, and 2 for those to which
the model gives the other token type (`batches/token_types.py` hands these types on). No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaswift.data.groups.rows import TextOrPair
from megaswift.data.tokenizer import backend_tokenizer_from_json

SECOND = 2
"""The mask of tokens of the second type."""


@dataclass(frozen=True)
class EncoderTexts:
    """Settings of an encoder's tokenizer; plain values that travel to worker processes."""

    types: bool
    """Whether the model has types of tokens, by which it tells the texts of a pair apart."""
    most: int = 0
    """Tokens to which texts are cut, special ones included; 0: they stay whole."""


class EncoderTokenizer:
    """The tokenizer of an encoder."""

    def __init__(self, tokenizer: str, texts: EncoderTexts, splits_special_tokens: bool) -> None:
        """`tokenizer`: as JSON."""
        self._texts = texts
        self._tokenizer = backend_tokenizer_from_json(tokenizer)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        if texts.most:  # as transformers cuts: of a pair, tokens of the longer text first
            self._tokenizer.enable_truncation(max(texts.most, self._tokenizer.num_special_tokens_to_add(True)))
        self._tokenizer.encode_special_tokens = splits_special_tokens  # which its JSON leaves out
        self.cut = 0
        """Texts and pairs that were cut so far."""

    def encode(self, texts: Sequence[TextOrPair]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return (int32 tokens [n], uint8 masks [n]) of each text or pair."""
        return [self._arrays(encoding) for encoding in self._tokenizer.encode_batch(list(texts))]

    def encode_words(self, rows: Sequence[Sequence[str]]) -> list[Any]:
        """Return the encoding of each row of words, special tokens included."""
        encodings = self._tokenizer.encode_batch([list(words) for words in rows], is_pretokenized=True)
        self.cut += sum(bool(encoding.overflowing) for encoding in encodings)
        return list(encodings)

    def _arrays(self, encoding: Any) -> tuple[np.ndarray, np.ndarray]:
        self.cut += bool(encoding.overflowing)
        ids = np.array(encoding.ids, dtype=np.int32)
        types = np.array(encoding.type_ids, dtype=np.uint8) if self._texts.types else np.zeros(len(ids), np.uint8)
        return ids, types + np.uint8(1)
