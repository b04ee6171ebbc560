"""The order of rows of several data sets that are mixed by weights (`--interleave_prob`).

Owns the random choice of the data set that each row is from, and the rows of a stored pass. The order is that of
`datasets.interleave_datasets` for the same probabilities, seed and stopping strategy. A pass has the same rows in each
epoch; where a stream stands in its data sets is `stream/cursor.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megaswift.data.groups.documents import GroupDocuments
from megaswift.data.preference.documents import PreferenceDocuments
from megaswift.data.store.documents import Documents

DRAWS = 1 << 16
FIRST = "first_exhausted"
ALL = "all_exhausted"
ONCE = "all_exhausted_without_replacement"


@dataclass(frozen=True)
class Interleaving:
    """Weights of data sets, and when a pass over them ends."""

    weights: tuple[float, ...]
    strategy: str
    """`first_exhausted`: with the last row of any data set; `all_exhausted`: with the last row of the one that is read
    to its end last, while others begin anew; `all_exhausted_without_replacement`: with the last row of all, each once.
    """
    seed: int

    def sources(self, start: int = 0) -> Iterator[int]:
        """The data set of each draw of a pass, from draw `start` on, without end."""
        cumulative = np.cumsum(np.array(self.weights) / sum(self.weights))
        cumulative /= cumulative[-1]
        bits = np.random.PCG64(self.seed)
        bits.advance(start)  # a draw takes one number of the generator
        generator = np.random.Generator(bits)
        while True:
            yield from cumulative.searchsorted(generator.random(DRAWS), side="right").tolist()

    def ends(self, exhausted: Sequence[bool]) -> bool:
        """Whether a pass is over when these data sets have been read to their ends."""
        return any(exhausted) if self.strategy == FIRST else all(exhausted)

    def rows(self, lengths: Sequence[int]) -> np.ndarray:
        """int64 [rows of a pass]: row numbers, counted through data sets of these lengths in order."""
        assert len(lengths) == len(self.weights) and min(lengths) > 0
        first = np.cumsum([0, *lengths[:-1]])
        used = [0] * len(lengths)
        exhausted = [False] * len(lengths)
        rows = []
        for k in self.sources():
            if self.strategy == ONCE and exhausted[k]:
                continue
            rows.append(int(first[k]) + used[k] % lengths[k])
            used[k] += 1
            exhausted[k] = used[k] >= lengths[k]
            if exhausted[k] and self.ends(exhausted):
                break
        return np.array(rows, dtype=np.int64)


def interleaving_of(data: Any, seed: int) -> Interleaving | None:
    """What the options of section `data` ask for; None where data sets are concatenated."""
    return Interleaving(data.interleave_prob, data.stopping_strategy, seed) if data.interleave_prob else None


def _rows_of_entries(docs: Documents) -> list[int]:
    """Documents of each entry of `--dataset`."""
    counts: list[int] = np.bincount(np.array(docs.entries)[docs.store]).tolist()
    return counts


def interleave_documents(docs: Documents, mixing: Interleaving | None) -> Documents:
    """The documents of a pass; all in file order without `mixing`."""
    if mixing is None:
        return docs
    mixed = docs.take(mixing.rows(_rows_of_entries(docs)))
    return replace(mixed, counted=docs.counted | {"rows": len(mixed)})


def interleave_preferences(units: PreferenceDocuments, mixing: Interleaving | None) -> PreferenceDocuments:
    """The pairs or labeled completions of a pass; all in file order without `mixing`."""
    if mixing is None:
        return units
    mixed = units.take(mixing.rows([rows // units.width for rows in _rows_of_entries(units.docs)]))
    return replace(mixed, docs=replace(mixed.docs, counted=units.docs.counted | {"rows": len(mixed)}))


def interleave_groups(groups: GroupDocuments, mixing: Interleaving | None) -> GroupDocuments:
    """The groups of a pass; all in file order without `mixing`."""
    if mixing is None:
        return groups
    entries = np.array(groups.docs.entries)[groups.docs.store[groups.bounds[:-1]]]
    mixed = groups.take(mixing.rows(np.bincount(entries).tolist()))
    return replace(mixed, docs=replace(mixed.docs, counted=groups.docs.counted | {"rows": len(mixed)}))
