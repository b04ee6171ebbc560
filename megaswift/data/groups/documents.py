"""Groups of documents for training: a query with its documents, or the candidates of a query.

Owns what truncation means for a group, and the micro-batches: the documents of all groups of a micro-batch, packed or
not, and where each group has them (`losses.retrieval.groups`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megaswift.data.batches.collate import Document, PaddingShape
from megaswift.data.batches.token_types import batch_with_token_types
from megaswift.data.preference.collate import collate_preferences
from megaswift.data.sources.files import DatasetFiles
from megaswift.data.store.documents import (
    Documents,
    gather_documents,
    held_out_mask,
    rows_of_units,
    too_long_documents_error,
)
from megaswift.data.store.token_store import TokenStore
from megaswift.errors import DataError, Problem
from megaswift.losses.contract import Batch

GroupRow = tuple[list[Document], np.ndarray] | tuple[()]
"""The documents of a group and a value for each; an empty one is without weight."""


@dataclass(frozen=True)
class GroupDocuments:
    """Groups in file order."""

    docs: Documents
    """Those of a group one after the other."""
    values: np.ndarray
    """float32 [documents]."""
    bounds: np.ndarray
    """int64 [groups + 1]: where the documents of each begin, and the end."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def width(self) -> int:
        """Documents of the largest group."""
        return int(np.diff(self.bounds).max(initial=1))

    def take(self, which: np.ndarray) -> GroupDocuments:
        """Some of the groups, in the order asked for."""
        rows = rows_of_units(self.bounds, which)
        bounds = np.concatenate([[0], np.cumsum(np.diff(self.bounds)[which])])
        return GroupDocuments(self.docs.take(rows), self.values[rows], bounds)


def gather_groups(stores: list[tuple[DatasetFiles, TokenStore]]) -> GroupDocuments:
    """All groups of the data sets in order, each taken as often as its `#rows` says."""
    docs = gather_documents(stores)
    values = []
    sizes = []
    for source, store in stores:
        assert store.values is not None
        bounds = store.unit_bounds
        units = len(bounds) - 1
        taken = np.arange(units) if source.rows is None else np.array(source.taken(units), dtype=np.int64)
        values.append(store.values[rows_of_units(bounds, taken)])
        sizes.append(np.diff(bounds)[taken])
    return GroupDocuments(
        docs, np.concatenate(values), np.concatenate([[0], np.cumsum(np.concatenate(sizes))]).astype(np.int64)
    )


def without_long_groups(groups: GroupDocuments, max_length: int, strategy: str) -> GroupDocuments:
    """The groups whose documents all have at most `max_length` tokens; others are counted, or with the strategy `raise`
    a DataError. With `right`, texts were cut when they became tokens."""
    long = groups.docs.length > max_length
    if not long.any():
        return groups
    if strategy == "raise":
        raise too_long_documents_error(groups.docs, np.flatnonzero(long), max_length)
    whole = np.add.reduceat(long, groups.bounds[:-1]) == 0
    if not whole.any():
        longest = int(groups.docs.length.max())
        rule = f"none of {len(groups)} rows remains: the longest text has {longest} tokens"
        fix = f"--max_length {longest}, or --truncation_strategy right"
        raise DataError(Problem(f"--max_length {max_length}", rule, fix))
    kept = groups.take(np.flatnonzero(whole))
    counted = groups.docs.counted | {"deleted": int((~whole).sum())}
    return replace(kept, docs=replace(kept.docs, counted=counted, beyond=groups.docs.length[long] - max_length))


def hold_out_groups(groups: GroupDocuments, ratio: float, seed: int) -> tuple[GroupDocuments, GroupDocuments | None]:
    """(training, evaluation) groups, chosen as rows are."""
    if ratio <= 0:
        return groups, None
    is_held_out = held_out_mask(groups.docs.sample[groups.bounds[:-1]], ratio, seed)
    return groups.take(np.flatnonzero(~is_held_out)), groups.take(np.flatnonzero(is_held_out))


@dataclass
class GroupDataset:
    """Numbered groups for a loader."""

    groups: GroupDocuments
    packing: bool
    width: int
    """Places for the documents of a group in every micro-batch: the same on all ranks, which gather them."""

    @property
    def docs(self) -> Documents:
        """The documents of all groups."""
        return self.groups.docs

    def __len__(self) -> int:
        return len(self.groups)

    def read(self, row: int) -> tuple[list[Document], np.ndarray]:
        """The documents of a group, and their values."""
        docs = self.docs
        a, b = (int(edge) for edge in self.groups.bounds[row : row + 2])
        return [(*docs.read(i), int(docs.sample[i])) for i in range(a, b)], self.groups.values[a:b]

    def row_lengths(self) -> np.ndarray:
        """int64 [groups]: the tokens of each group's longest document."""
        longest: np.ndarray = np.maximum.reduceat(self.docs.length, self.groups.bounds[:-1])
        return longest.astype(np.int64)

    def batches(self, rows: Sequence[Sequence[GroupRow]], shape: PaddingShape, uniform: bool) -> list[Batch]:
        """Tensors of a step's micro-batches."""
        documents: list[list[Document | None]] = []
        for micro in rows:
            present: list[Document | None] = [d for group in micro if group for d in group[0]]
            documents.append(present or [None])
        if not self.packing:  # all micro-batches of a step have as many rows, so that pipelines see one shape
            most = max(map(len, documents)) if uniform else 0
            documents = [micro + [None] * (most - len(micro)) for micro in documents]
        laid = collate_preferences(documents, self.packing, shape, uniform)
        if not self.packing:
            laid = [batch_with_token_types(b, micro) for b, micro in zip(laid, documents, strict=True)]
        return [replace(batch, fields=self._fields(micro)) for micro, batch in zip(rows, laid, strict=True)]

    def _fields(self, micro: Sequence[GroupRow]) -> dict[str, torch.Tensor]:
        places = torch.full((len(micro), self.width), -1)
        values = torch.full((len(micro), self.width), float("nan"))
        number = 0
        for i, group in enumerate(micro):
            if group:
                count = len(group[0])
                places[i, :count] = torch.arange(number, number + count)
                values[i, :count] = torch.from_numpy(np.asarray(group[1]))
                number += count
        return {"documents": places, "values": values}

    def stats(self, shape: PaddingShape) -> dict[str, float]:
        """Groups, which `rows` counts."""
        return {"texts": float(len(self.docs))}
