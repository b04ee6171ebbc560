"""Lays a prompt once for all of its answers in a packed row.

Owns which tokens are shared: a prompt's but the last, which stays with each answer because its label is the answer's
first token. Attention of an answer to the shared tokens is the engines' (`Batch.prefixes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megaswift.data.batches.collate import Document
from megaswift.data.preference.encode import first_labeled_token
from megaswift.losses.contract import Batch

UNSHARED = -1
"""In place of the number of a prefix."""


@dataclass(frozen=True)
class SharedPrefixDocuments:
    """The documents of one packed row, prefixes among them."""

    documents: list[Document]
    prefixes: list[int]
    """For each document, the number of the document that holds its first tokens, or `UNSHARED`."""
    starts: list[int]
    """Position of each document's first token."""
    numbers: list[int]
    """Where the given documents are, in their order."""

    def mark(self, batch: Batch) -> Batch:
        """The collated row with positions that go on from a prefix, and `Batch.prefixes`."""
        if not any(self.starts):
            return batch
        assert batch.cu_seqlens is not None
        first = torch.tensor(self.starts).repeat_interleave(batch.cu_seqlens.diff())
        return replace(batch, positions=batch.positions + first, prefixes=torch.tensor(self.prefixes))


def share_prefixes(documents: Sequence[Document], prompts: Sequence[int]) -> SharedPrefixDocuments:
    """Neighbours with equal prompts share these. `prompts`: tokens of each document's prompt."""
    laid = SharedPrefixDocuments([], [], [], [])
    groups = [_shared_with_next(documents, prompts, i) for i in range(len(documents) - 1)] + [False]
    prefix = UNSHARED
    shared = 0
    for i, (ids, weights, sample) in enumerate(documents):
        if prefix == UNSHARED and groups[i]:
            prefix = len(laid.documents)
            shared = prompts[i] - 1
            _append(laid, (ids[:shared], np.zeros(shared, dtype=weights.dtype), -1), UNSHARED, 0)
        laid.numbers.append(len(laid.documents))
        _append(laid, (ids[shared:], weights[shared:], sample), prefix, shared)
        if not groups[i]:
            prefix = UNSHARED
            shared = 0
    return laid


def common_prompt_lengths(documents: Sequence[Document], width: int) -> list[int]:
    """Counts, for each document, the tokens before a label that the `width` documents of its unit have in common."""
    lengths: list[int] = []
    for start in range(0, len(documents), width):
        unit = [(ids, first_labeled_token(weights)) for ids, weights, _ in documents[start : start + width]]
        least = min(min(len(ids), label) for ids, label in unit)
        same = np.all([ids[:least] == unit[0][0][:least] for ids, _ in unit], axis=0)
        lengths += [least if same.all() else int(same.argmin())] * len(unit)
    return lengths


def _shared_with_next(documents: Sequence[Document], prompts: Sequence[int], i: int) -> bool:
    count = prompts[i]
    equal = count == prompts[i + 1] and np.array_equal(documents[i][0][:count], documents[i + 1][0][:count])
    return count > 1 and bool(equal)


def _append(laid: SharedPrefixDocuments, document: Document, prefix: int, start: int) -> None:
    laid.documents.append(document)
    laid.prefixes.append(prefix)
    laid.starts.append(start)
