"""Incremental detokenization: complete characters only, without stop strings.

A token may end inside a character, or in what could become a stop text; both are held back until the next token
decides.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

BROKEN = "\ufffd"
"""What decoding makes of the first bytes of a character."""


def decode_tokens(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of tokens without the special ones; spaces as the tokens have them."""
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def special_token_texts(tokenizer: Any) -> frozenset[str]:
    """The special tokens, which are no part of an answer's text, as a stop text may name them."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    named = getattr(tokenizer, "all_special_tokens", ())
    return frozenset([*named, *(token.content for token in added if token.special)])


def stop_symbols(text: str, special: frozenset[str]) -> tuple[str, ...]:
    """A stop text as it comes from a model: its characters, and each special token in it whole."""
    names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True) if name)
    return tuple(re.findall(f"{names}|.", text, re.DOTALL)) if names else tuple(text)


@functools.lru_cache(maxsize=256)
def _borders(text: Sequence[str]) -> list[int]:
    """For each beginning of a text, the length of its longest proper beginning that is also its end (Knuth, Morris and
    Pratt, SIAM J. Comput. 6, 1977)."""
    borders = [0] * len(text)
    length = 0
    for end in range(1, len(text)):
        while length and text[end] != text[length]:
            length = borders[length - 1]
        length += text[end] == text[length]
        borders[end] = length
    return borders


class StopStringMatcher:
    """Looks for one stop text in text that comes in pieces. The time is linear in both, whatever they are.

    A text is a sequence of symbols: characters, and special tokens whole.
    """

    def __init__(self, text: Sequence[str]) -> None:
        self.text = text
        self._borders = _borders(text)
        self.begun = 0
        """How many symbols of the stop text are at the end of what came."""

    def find(self, piece: Sequence[str]) -> int | None:
        """Where the stop text begins, counted from the start of the piece (below 0: before it), if it is complete."""
        for length, symbol in enumerate(piece, 1):
            while self.begun and symbol != self.text[self.begun]:
                self.begun = self._borders[self.begun - 1]
            self.begun += symbol == self.text[self.begun]
            if self.begun == len(self.text):
                return length - self.begun
        return None


class IncrementalDetokenizer:
    """The text of one answer."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        special = special_token_texts(tokenizer) if stop else frozenset()
        # The characters of a special token may come from ordinary tokens too.
        with_special = [symbols for text in stop if len(symbols := stop_symbols(text, special)) < len(text)]
        self._stops = [StopStringMatcher(symbols) for symbols in (*stop, *with_special)]
        self.text = ""
        """What was given out."""
        self.stopped = False
        self._ids: list[int] = []
        self._shown = 0
        self._next = 0
        self._held: list[tuple[str, bool]] = []
        """Symbols that may begin a stop text, and whether they are part of the answer's text."""

    @property
    def length(self) -> int:
        """Characters so far, with those that are held back."""
        return len(self.text) + sum(shown for _, shown in self._held)

    @property
    def blank(self) -> bool:
        """Whether no token up to now has any text."""
        return not self._next and not decode_tokens(self.tokenizer, self._ids)

    def add(self, token: int) -> str:
        """The text that is certain with this token."""
        self._ids.append(token)
        # Decoded together with the tokens before it, because a token alone may lose the space before it; those before
        # stay few.
        before, now = self._window()
        # no text yet, or a special token, after which the space would be lost too
        if now.endswith(BROKEN) or len(now) <= len(before):
            return self.end(token) if self._stops and not decode_tokens(self.tokenizer, [token]) else ""
        self._shown = self._next
        self._next = len(self._ids)
        return self._give(now[len(before) :], shown=True)

    def end(self, token: int) -> str:
        """The text that is certain with a special token, which may be a stop text or belong to one."""
        name = self.tokenizer.decode([token], clean_up_tokenization_spaces=False)
        return self._give([name], shown=False) if name else ""

    def finish(self) -> str:
        """What was still held back, when no token follows."""
        if self.stopped:
            return ""
        before, now = self._window()
        last = self._give(now[len(before) :], shown=True)
        if not self.stopped:
            rest = "".join(symbol for symbol, shown in self._held if shown)
            self._held = []
            self.text += rest
            last += rest
        return last

    def _window(self) -> tuple[str, str]:
        """Text of the tokens before the last ones, and with them."""
        before = decode_tokens(self.tokenizer, self._ids[self._shown : self._next])
        return before, decode_tokens(self.tokenizer, self._ids[self._shown :])

    def _give(self, new: Sequence[str], shown: bool) -> str:
        positions = [at for stop in self._stops if (at := stop.find(new)) is not None]
        self._held += [(symbol, shown) for symbol in new]
        if positions:
            keep = len(new) - min(positions)
            self.stopped = True
        else:
            keep = max((stop.begun for stop in self._stops), default=0)
        at = len(self._held) - keep
        certain = "".join(symbol for symbol, visible in self._held[:at] if visible)
        self._held = [] if self.stopped else self._held[at:]
        self.text += certain
        return certain
