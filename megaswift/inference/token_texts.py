"""The bytes and the text of single tokens, as they stand in the text of an answer.

A token may be a part of a character, and a decoder of SentencePiece drops the space before the first token of a text
only, so decoding a token alone gives neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megaswift.data.token_bytes import bytes_of_stored_token
from megaswift.inference.detokenizer import BROKEN, decode_tokens


class TokenTexts:
    """Bytes and text of a tokenizer's tokens. For one thread, as the tokenizer is."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._known: dict[tuple[int, bool], bytes] = {}
        self._word: list[int] | None = None

    def utf8(self, token: int, first: bool = False) -> bytes:
        """The UTF-8 bytes that the token adds to an answer; none for a special token, which is no part of its text.

        Args:
            token: Number of the token.
            first: Whether no text precedes it.
        """
        key = (token, first)
        if key not in self._known:
            self._known[key] = self._utf8(token, first)
        return self._known[key]

    def text(self, token: int) -> str:
        """The token decoded alone; a special token by its name, and a row beyond the vocabulary by its number."""
        text: str = self.tokenizer.decode([token], clean_up_tokenization_spaces=False)
        return text if text or token < len(self.tokenizer) else f"<|token_{token}|>"

    def starts(self, entries: Sequence[int], text: str) -> list[int]:
        """Where in `text`, a prompt that these tokens were made of, each of them begins, in characters.

        A token that the tokenizer added to the text (BOS) takes no place.
        """
        stored = text.encode("utf-8")
        character_of_byte = [*(i for i, character in enumerate(text) for _ in character.encode("utf-8")), len(text)]
        starts: list[int] = []
        at = 0
        for token in entries:
            starts.append(character_of_byte[at])
            forms = (self.utf8(token, not at), self.text(token).encode("utf-8"))
            at += next((len(form) for form in forms if form and stored.startswith(form, at)), 0)
        return starts

    def _utf8(self, token: int, first: bool) -> bytes:
        before = [] if first else self._before()
        text = decode_tokens(self.tokenizer, [*before, token])[len(decode_tokens(self.tokenizer, before)) :]
        if BROKEN not in text:
            return text.encode("utf-8")
        stored = bytes_of_stored_token(self.tokenizer.convert_ids_to_tokens(token))
        return text.encode("utf-8") if stored is None else stored

    def _before(self) -> list[int]:
        """A token of letters, after which others are decoded as within a text."""
        if self._word is None:
            texts = ((token, decode_tokens(self.tokenizer, [token])) for token in range(len(self.tokenizer)))
            self._word = next(([token] for token, text in texts if text.isascii() and text.isalnum()), [])
        return self._word
