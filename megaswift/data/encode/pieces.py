"""Tokenizes texts by encoding each distinct piece only once.

Owns a table from pieces to tokens. Texts are cut where `split_points.py` has proven that it changes nothing;
a piece is a word
with the space before it, mostly, so nearly all have been seen before, and looking them up is several times faster than
encoding them. Loss spans become tokens by the same rule as with offsets (`token_range`), which only a piece with an
edge inside still needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from tokenizers import Encoding, Tokenizer

from megaswift.data.encode.split_points import TokenSafeSplitPatterns

Spans = Sequence[tuple[int, int]]
MOST_PIECES = 1 << 18
MOST_CHARS = 1 << 24
"""The table begins anew when it has grown beyond these (some 50 MiB)."""
REMEMBERED = 64
"""Characters of the longest piece whose inner edges are kept."""
JOINED = 512
"""New pieces that are encoded as one text."""


class _Numbers(dict[str, int]):
    """Pieces to numbers; an unknown piece gets the next one and is remembered in `new`."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[str] = []

    def __missing__(self, piece: str) -> int:
        number = self[piece] = len(self)
        self.new.append(piece)
        return number


@dataclass(frozen=True)
class ConcatenatedTextTokens:
    """Tokens of several texts, one after the other."""

    ids: np.ndarray
    """int32 [tokens]"""
    mask: np.ndarray
    """[tokens]: 1 for tokens that touch a span (uint8), or the span's weight (float32)."""
    ends: np.ndarray
    """int64 [texts]: where each text ends."""


class DistinctPieceEncoder:
    """Encodes texts for one tokenizer. `token_range` is `rows.token_range_of_characters`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        cuts: TokenSafeSplitPatterns,
        token_range: Callable[[Encoding, int, int, int], tuple[int, int]],
    ) -> None:
        self._tokenizer = tokenizer
        self._cuts = cuts
        self._token_range = token_range
        self._separator = -1 if cuts.separator is None else tokenizer.token_to_id(cuts.separator)
        self._reset()

    def _reset(self) -> None:
        self._numbers = _Numbers()
        self._edges: dict[tuple[str, int], tuple[int, int]] = {}
        self._ids = np.zeros(0, dtype=np.int32)
        self._begin = np.zeros(1, dtype=np.int64)
        """[pieces + 1]: piece k has the tokens ids[begin[k]: begin[k + 1]]."""
        self._chars = np.zeros(0, dtype=np.int64)
        for token in self._cuts.added:
            self._numbers[token]  # gets its number: the separator must not be among pieces that are joined
        self._learn(self._apart)

    def encode(
        self, texts: Sequence[str], spans: Sequence[Spans], weights: Sequence[Sequence[float]] | None = None
    ) -> ConcatenatedTextTokens:
        """Tokens of `texts`, and which of them touch one of each text's `spans` (character ranges in order), or the
        `weights` of these spans (of each text; empty: 1). A token of two spans has the later one's weight."""
        known = len(self._chars)
        full = max(known, len(self._edges)) > MOST_PIECES or self._chars.sum() > MOST_CHARS
        if full or known != len(self._numbers):  # the latter: the tokenizer refused a text
            self._reset()
        pieces: list[str] = []
        ends = [self._cut(text, pieces) for text in texts]
        numbers = np.fromiter(map(self._numbers.__getitem__, pieces), np.int64, len(pieces))
        self._learn(self._joined)
        counts = (self._begin[1:] - self._begin[:-1])[numbers]
        token_at = _sums(counts)
        ids = self._ids[np.repeat(self._begin[numbers] - token_at[:-1], counts) + np.arange(token_at[-1])]
        char_at = _sums(self._chars[numbers])
        edges = _shifted(texts, spans)
        touched = self._tokens_of_spans(pieces, char_at, token_at, edges)
        if weights is None:
            mask = _covered(touched, token_at[-1])
        else:
            mask = np.zeros(token_at[-1], dtype=np.float32)
            flat = [w for some, own in zip(spans, weights, strict=True) for w in _of_spans(some, own)]
            for (first, last), weight in zip(touched.tolist(), flat, strict=True):
                mask[first:last] = weight
        return ConcatenatedTextTokens(ids, mask, token_at[np.array(ends, dtype=np.int64)])

    def _cut(self, text: str, pieces: list[str]) -> int:
        """Add the pieces of `text`; how many there are now. Empty ones do no harm."""
        find = self._cuts.parts.findall
        for i, part in enumerate(self._cuts.tokens.split(text)):
            if i % 2:
                pieces.append(part)
            elif part:
                pieces += find(part)
        return len(pieces)

    def _learn(self, encode: Callable[[list[str]], list[np.ndarray]]) -> None:
        new = self._numbers.new
        self._numbers.new = []
        if not new:
            return
        encodings = encode(new)
        counts = np.fromiter(map(len, encodings), np.int64, len(encodings))
        self._ids = np.concatenate([self._ids, *encodings])
        self._begin = np.concatenate([self._begin, self._begin[-1] + np.cumsum(counts)])
        self._chars = np.concatenate([self._chars, np.fromiter(map(len, new), np.int64, len(new))])

    def _apart(self, pieces: list[str]) -> list[np.ndarray]:
        """int32 tokens of each piece."""
        return [
            np.array(e.ids, dtype=np.int32) for e in self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        ]

    def _joined(self, pieces: list[str]) -> list[np.ndarray]:
        """The same, twice as fast, with an added token between the pieces."""
        if self._cuts.separator is None:
            return self._apart(pieces)
        groups = [pieces[i : i + JOINED] for i in range(0, len(pieces), JOINED)]
        out: list[np.ndarray] = []
        for group, ids in zip(groups, self._apart([self._cuts.separator.join(g) for g in groups]), strict=True):
            separators = [-1, *np.flatnonzero(ids == self._separator).tolist(), len(ids)]
            whole = len(separators) == len(group) + 1  # or the normalizer has made another separator
            out += [ids[a + 1 : b] for a, b in pairwise(separators)] if whole else self._apart(group)
        return out

    def _tokens_of_spans(
        self, pieces: list[str], char_at: np.ndarray, token_at: np.ndarray, edges: np.ndarray
    ) -> np.ndarray:
        """int64 [spans, 2]: the tokens that touch each pair of `edges` [spans, 2], character positions in all texts."""
        places = np.searchsorted(char_at, edges, side="right") - 1
        inner = edges - char_at[places]
        tokens = token_at[places]
        for span, side in np.argwhere(inner > 0).tolist():
            tokens[span, side] += self._edge(pieces[places[span, side]], int(inner[span, side]))[side]
        return tokens

    def _edge(self, piece: str, at: int) -> tuple[int, int]:
        """(first token of a span that begins, one past the last of one that ends) at a character inside `piece`."""
        edge = self._edges.get((piece, at))
        if edge is None:
            encoding = self._tokenizer.encode(piece, add_special_tokens=False)
            first, last = self._token_range(encoding, at, len(piece), len(piece))
            edge = first if last else len(encoding), self._token_range(encoding, 0, at, len(piece))[1]
            if len(piece) <= REMEMBERED:
                self._edges[piece, at] = edge
        return edge


def _sums(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)])


def _covered(spans: np.ndarray, count: int) -> np.ndarray:
    """uint8 [count]: ones within each of `spans` [spans, 2]."""
    steps = np.zeros(count + 1, dtype=np.int64)
    np.add.at(steps, spans[:, 0], 1)
    np.subtract.at(steps, np.maximum(spans[:, 0], spans[:, 1]), 1)
    return (np.cumsum(steps[:-1]) > 0).astype(np.uint8)


def _of_spans(spans: Spans, weights: Sequence[float]) -> list[float]:
    """The weights of the spans that hold anything."""
    return [w for (a, b), w in zip(spans, weights or (1.0,) * len(spans), strict=True) if a < b]


def _shifted(texts: Sequence[str], spans: Sequence[Spans]) -> np.ndarray:
    """int64 [spans, 2]: the spans that hold anything, as positions in all texts one after the other."""
    starts = _sums(np.fromiter(map(len, texts), np.int64, len(texts))).tolist()
    flat = [(start + a, start + b) for start, some in zip(starts, spans, strict=False) for a, b in some if a < b]
    return np.array(flat, dtype=np.int64).reshape(-1, 2)
