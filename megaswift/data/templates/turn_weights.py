"""Divides the text of an assistant's turn into parts with loss weights, by the tables of `--loss_scale`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property

from megaswift.data.options.loss_scale import LossWeightTable

WeightedSpan = tuple[int, int, float]
"""Characters [begin, end) and the loss weight of their tokens."""


class TurnWeights:
    """The tables of a run."""

    def __init__(self, tables: Sequence[LossWeightTable], end_tokens: Sequence[str]) -> None:
        """`end_tokens`: the texts that may end a turn. Tables do not see an end token; its weight is 1."""
        self._tables = [_CompiledTable(table) for table in tables]
        self._ends = sorted(end_tokens, key=len, reverse=True)

    @property
    def divides(self) -> bool:
        """Whether a turn may have more than one weight, or another than 1."""
        return bool(self._tables)

    def spans(self, text: str, begin: int, end: int, question: str) -> list[WeightedSpan]:
        """The parts of the turn text[begin:end] that carry loss, in order; `question` is the user's last message."""
        if not self._tables:
            return [(begin, end, 1.0)]
        turn = text[begin : self._content_end(text, begin, end)]
        weights = [1.0] * len(turn)
        for table in self._tables:
            for a, b, weight in table.parts(turn, question):
                if weight != 1:
                    weights[a:b] = [w * weight for w in weights[a:b]]
        weights += [1.0] * (end - begin - len(turn))
        return list(_runs(weights, begin))

    def _content_end(self, text: str, begin: int, end: int) -> int:
        said = text[begin:end].rstrip()
        last = next((token for token in self._ends if said.endswith(token)), "")
        return begin + len(said) - len(last) if last else end


class _CompiledTable:
    def __init__(self, table: LossWeightTable) -> None:
        self._table = table

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], float]]:
        return [(re.compile(text, re.DOTALL), weight) for text, weight in self._table.patterns.items()]

    @cached_property
    def _keywords(self) -> re.Pattern[str] | None:
        longest_first = sorted(self._table.keywords, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def parts(self, turn: str, question: str) -> Iterator[WeightedSpan]:
        """Parts with a weight of their own; one of a pattern may lie within one of a keyword."""
        for phrase, weight in self._table.queries.items():
            if phrase in question:
                yield 0, len(turn), weight
                return
        if self._keywords is not None:
            found = list(self._keywords.finditer(turn))
            for match, following in zip(found, [*found[1:], None], strict=False):
                own, rest = self._table.keywords[match.group()]
                yield match.start(), match.end(), own
                yield match.end(), following.start() if following else len(turn), rest
        yield from self._matches(turn)

    def _matches(self, turn: str) -> Iterator[WeightedSpan]:
        """What the patterns match, the leftmost first, then on from its end."""
        at = 0
        while at < len(turn):
            searches = [(pattern.finditer(turn, at), weight) for pattern, weight in self._patterns]
            firsts = [(next((m for m in search if m.group()), None), weight) for search, weight in searches]
            matches = [(match, weight) for match, weight in firsts if match is not None]
            if not matches:
                return
            match, weight = min(matches, key=lambda one: one[0].start())
            yield match.start(), match.end(), weight
            at = match.end()


def _runs(weights: Sequence[float], begin: int) -> Iterator[WeightedSpan]:
    """Runs of equal weights but for those of 0."""
    start = 0
    for i in range(1, len(weights) + 1):
        if i == len(weights) or weights[i] != weights[start]:
            if weights[start]:
                yield begin + start, begin + i, weights[start]
            start = i
