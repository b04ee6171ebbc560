"""Incremental detokenization: complete characters only, without stop strings.

A token may end inside a character, or in what could become a stop text; both are held back until the next token
decides.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

BROKEN = "\ufffd"
"""What decoding makes of the first bytes of a character."""


def decode_tokens(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of tokens without the special ones; spaces as the tokens have them."""
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


@functools.lru_cache(maxsize=256)
def _borders(text: str) -> list[int]:
    """For each beginning of a text, the length of its longest proper beginning that is also its end (Knuth, Morris and
    Pratt, SIAM J. Comput. 6, 1977)."""
    borders, length = [0] * len(text), 0
    for end in range(1, len(text)):
        while length and text[end] != text[length]:
            length = borders[length - 1]
        length += text[end] == text[length]
        borders[end] = length
    return borders


class StopStringMatcher:
    """Looks for one stop text in text that comes in pieces. The time is linear in both, whatever they are."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.begun = 0
        """How many characters of the stop text are at the end of what came."""

    def find(self, piece: str) -> int | None:
        """Where the stop text begins, counted from the start of the piece (below 0: before it), if it is complete."""
        borders = _borders(self.text)
        for length, character in enumerate(piece, 1):
            while self.begun and character != self.text[self.begun]:
                self.begun = borders[self.begun - 1]
            self.begun += character == self.text[self.begun]
            if self.begun == len(self.text):
                return length - self.begun
        return None


class IncrementalDetokenizer:
    """The text of one answer."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self._stops = [StopStringMatcher(text) for text in stop]
        self.text = ""
        """What was given out."""
        self.stopped = False
        self._ids: list[int] = []
        self._shown, self._next = 0, 0
        self._held = ""

    @property
    def length(self) -> int:
        """Characters so far, with those that are held back."""
        return len(self.text) + len(self._held)

    def add(self, token: int) -> str:
        """The text that is certain with this token."""
        self._ids.append(token)
        # Decoded together with the tokens before it, because a token alone may lose the space before it; those before
        # stay few.
        before, now = (
            decode_tokens(self.tokenizer, self._ids[self._shown : self._next]),
            decode_tokens(self.tokenizer, self._ids[self._shown :]),
        )
        # no text yet, or a special token, after which the space would be lost too
        if now.endswith(BROKEN) or len(now) <= len(before):
            return ""
        self._shown, self._next = self._next, len(self._ids)
        return self._give(now[len(before) :])

    def finish(self) -> str:
        """What was still held back, when no token follows."""
        if self.stopped:
            return ""
        before, now = (
            decode_tokens(self.tokenizer, self._ids[self._shown : self._next]),
            decode_tokens(self.tokenizer, self._ids[self._shown :]),
        )
        last = self._give(now[len(before) :])
        if not self.stopped:
            last += self._held
            self.text, self._held = self.text + self._held, ""
        return last

    def _give(self, new: str) -> str:
        positions = [at for stop in self._stops if (at := stop.find(new)) is not None]
        self._held += new
        if positions:
            keep, self.stopped = len(new) - min(positions), True
        else:
            keep = max((stop.begun for stop in self._stops), default=0)
        at = len(self._held) - keep
        certain, self._held = self._held[:at], "" if self.stopped else self._held[at:]
        self.text += certain
        return certain
