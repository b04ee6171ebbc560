"""Tokens to text as they come: only whole characters, nothing of a stop text, nothing twice.

A token may end inside a character, or in what could become a stop text; both are held back until the next token
decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BROKEN = "\ufffd"
"""What decoding makes of the first bytes of a character."""


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of tokens without the special ones; spaces as the tokens have them."""
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


class TextStream:
    """The text of one answer."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
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
            decode(self.tokenizer, self._ids[self._shown : self._next]),
            decode(self.tokenizer, self._ids[self._shown :]),
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
            decode(self.tokenizer, self._ids[self._shown : self._next]),
            decode(self.tokenizer, self._ids[self._shown :]),
        )
        last = self._give(now[len(before) :])
        if not self.stopped:
            last += self._held
            self.text, self._held = self.text + self._held, ""
        return last

    def _give(self, new: str) -> str:
        self._held += new
        found = [at for at in (self._held.find(s) for s in self.stop) if at >= 0]
        if found:
            certain, self._held, self.stopped = self._held[: min(found)], "", True
        else:
            keep = max((n for s in self.stop for n in range(1, len(s)) if self._held.endswith(s[:n])), default=0)
            certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self.text += certain
        return certain
