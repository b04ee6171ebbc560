"""Collates preference pairs and labeled completions into micro-batches, packed or not, with the fields that
preference losses read.

Documents come in the order chosen_0, rejected_0, chosen_1, ... Packed, a micro-batch's own documents lie end to end in
one row; which units are in a micro-batch does not depend on it. `fields`: `pairs` int64 [p, 2], document numbers, and
`margin` float32 [p] where the data have margins; or `examples` int64 [n] and `label` bool [documents]. A unit without
weight has no entry there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megaswift.data.batches.collate import Document, PaddingShape
from megaswift.data.batches.loader import collate_step_microbatches
from megaswift.data.batches.prefix_sharing import common_prompt_lengths, share_prefixes
from megaswift.data.preference.documents import PreferenceDocuments
from megaswift.data.preference.encode import first_labeled_token
from megaswift.data.store.documents import Documents
from megaswift.data.vision.batches import StoredRowImages, VisionCollator
from megaswift.data.vision.processor import Processor
from megaswift.losses.contract import Batch


class PreferenceUnit(NamedTuple):
    """A unit as it is read."""

    documents: list[Document]
    value: float


PreferenceMicrobatch = Sequence[PreferenceUnit | tuple[()]]
"""The units of a micro-batch; an empty one is without weight."""


def collate_preferences(
    micro_documents: Sequence[Sequence[Document | None]], packing: bool, shape: PaddingShape, uniform: bool
) -> list[Batch]:
    """A step's micro-batches from the documents of each: end to end in one row, or one a row with None for a row
    without weight."""
    if packing:
        rows = [[[d for d in micro if d is not None]] for micro in micro_documents]
    else:
        rows = [[[] if d is None else [d] for d in micro] for micro in micro_documents]
    return collate_step_microbatches(rows, packing, shape, uniform)


@dataclass(frozen=True)
class PreferenceCollator:
    """How units become batches."""

    width: int
    """Documents a unit: two, or one."""
    packing: bool
    margins: bool
    """Whether the data have margins."""
    prompt_labels: bool = False
    """Prompts carry labels too (ORPO's likelihood); `fields["completion"]` float32 [b, s] then holds the loss weights
    of the completion."""
    towers: VisionCollator | None = None
    """For a vision-language model: adds the images of units that are not packed."""
    shares_prefixes: bool = False
    """Packed answers to the same prompt have it once."""

    def batches(self, rows: Sequence[PreferenceMicrobatch], shape: PaddingShape, uniform: bool) -> list[Batch]:
        """Tensors of a step's micro-batches."""
        documents = [self._documents(micro) for micro in rows]
        if self.shares_prefixes:
            return self._with_shared_prefixes(rows, documents, shape, uniform)
        if self.towers is not None:
            assert not self.packing and not self.prompt_labels
            laid = [self.towers.batch(micro, shape) for micro in documents]
        else:
            laid = collate_preferences(documents, self.packing, shape, uniform)
        fields = [self._fields(micro, range(self.width * len(micro))) for micro in rows]
        if self.prompt_labels:
            fields = [{**f, "completion": batch.loss_weights} for f, batch in zip(fields, laid, strict=True)]
            labeled = [[None if d is None else (d[0], np.ones_like(d[1]), d[2]) for d in micro] for micro in documents]
            laid = collate_preferences(labeled, self.packing, shape, uniform)
        return [replace(batch, fields=f) for f, batch in zip(fields, laid, strict=True)]

    def _with_shared_prefixes(
        self,
        rows: Sequence[PreferenceMicrobatch],
        documents: Sequence[Sequence[Document | None]],
        shape: PaddingShape,
        uniform: bool,
    ) -> list[Batch]:
        assert self.packing and self.towers is None and not self.prompt_labels
        kept = [[d for d in micro if d is not None] for micro in documents]
        shared = [share_prefixes(micro, common_prompt_lengths(micro, self.width)) for micro in kept]
        laid = collate_preferences([micro.documents for micro in shared], True, shape, uniform)
        return [
            replace(one.mark(batch), fields=self._fields(micro, one.numbers))
            for micro, one, batch in zip(rows, shared, laid, strict=True)
        ]

    def _documents(self, micro: PreferenceMicrobatch) -> list[Document | None]:
        return [d for unit in micro for d in (unit.documents if unit else [None] * self.width)]

    def _fields(self, micro: PreferenceMicrobatch, numbers: Sequence[int]) -> dict[str, torch.Tensor]:
        """Document numbers, of which `numbers` has those of answers; packed, units without weight have no documents."""
        units = [(i, unit.value) for i, unit in enumerate(micro) if unit]
        places = [(n if self.packing else i) * self.width for n, (i, _) in enumerate(units)]
        first = torch.tensor([numbers[place] for place in places], dtype=torch.int64)
        values = torch.tensor([value for _, value in units], dtype=torch.float32)
        if self.width == 2:
            second = torch.tensor([numbers[place + 1] for place in places], dtype=torch.int64)
            pairs = torch.stack([first, second], dim=1)
            return {"pairs": pairs, "margin": values} if self.margins else {"pairs": pairs}
        label = torch.zeros(max(1, len(units)) if self.packing else len(micro), dtype=torch.bool)
        label[first] = values > 0
        return {"examples": first, "label": label}


@dataclass
class PreferenceDataset:
    """Numbered units for a loader."""

    units: PreferenceDocuments
    packing: bool
    prompt_labels: bool = False
    processor: Processor | None = None
    """The processor of a vision-language model."""
    shares_prefixes: bool = False
    """Packed answers to the same prompt have it once; before the first batch."""

    @property
    def docs(self) -> Documents:
        """The documents of all units."""
        return self.units.docs

    def __len__(self) -> int:
        return len(self.units)

    @cached_property
    def layout(self) -> PreferenceCollator:
        """How they become batches."""
        towers = None if self.processor is None else VisionCollator(StoredRowImages(self.docs.stores), self.processor)
        margins = not np.isnan(self.units.values).any()
        return PreferenceCollator(
            self.units.width, self.packing, margins, self.prompt_labels, towers, self.shares_prefixes
        )

    def read(self, row: int) -> PreferenceUnit:
        """The documents of a unit and its margin or label."""
        width = self.units.width
        docs = self.docs
        which = range(row * width, (row + 1) * width)
        return PreferenceUnit([(*docs.read(i), int(docs.sample[i])) for i in which], float(self.units.values[row]))

    def row_lengths(self) -> np.ndarray:
        """int64 [units]: the tokens of each unit's longest answer."""
        longest: np.ndarray = self.docs.length.reshape(-1, self.units.width).max(axis=1).astype(np.int64)
        return longest

    def batches(self, rows: Sequence[PreferenceMicrobatch], shape: PaddingShape, uniform: bool) -> list[Batch]:
        """Tensors of a step's micro-batches."""
        return self.layout.batches(rows, shape, uniform)

    def stats(self, shape: PaddingShape) -> dict[str, float]:
        """Units that `rows` counts."""
        return {"pairs" if self.units.width == 2 else "examples": float(len(self))}


def split_batch_into_documents(batch: Batch) -> list[Document]:
    """The documents of a batch, rows or packed, with the tokens that carry loss."""
    if batch.cu_seqlens is None:
        spans = [(row, 0, batch.input_ids.shape[1]) for row in range(batch.input_ids.shape[0])]
    else:
        spans = [(0, a, b) for a, b in pairwise(batch.cu_seqlens.tolist())]
    documents: list[Document] = []
    for i, (row, a, b) in enumerate(spans):
        size = int(batch.valid[row, a:b].sum())
        mask = np.zeros(size, dtype=np.float32)
        mask[1:] = batch.loss_weights[row, a : a + max(0, size - 1)].cpu().numpy()
        ids = batch.input_ids[row, a : a + size].cpu().numpy().astype(np.int32)
        documents.append((ids, mask, -1 if batch.sample_ids is None else int(batch.sample_ids[i])))
    return documents


def labeled_documents(batches: Sequence[Batch]) -> list[list[Document]]:
    """The documents of each micro-batch's examples."""
    return _examples(batches, [split_batch_into_documents(batch) for batch in batches])


def _examples(batches: Sequence[Batch], split: Sequence[Sequence[Document]]) -> list[list[Document]]:
    return [[d[i] for i in b.fields["examples"].tolist()] for d, b in zip(split, batches, strict=True)]


def previous_in_global_batch(
    documents: Sequence[Sequence[Sequence[Document]]], dp_rank: int
) -> list[list[Document | None]]:
    """For each example of each micro-batch of `dp_rank`, the one before it in the global batch; before the first one
    the last. None where the global batch has no other.

    `documents`: of each data-parallel rank, `labeled_documents`. Rows of a global batch are in the order of
    `LoaderGeometry.own`, so the layout does not change the result.
    """
    places = [(m, rank) for m in range(len(documents[0])) for rank in range(len(documents))]
    rows = [document for m, rank in places for document in documents[rank][m]]
    previous = iter(rows[-1:] + rows[:-1] if len(rows) > 1 else [None] * len(rows))
    found: list[list[Document | None]] = [[] for _ in documents[0]]
    for m, rank in places:
        taken = [next(previous) for _ in documents[rank][m]]
        if rank == dp_rank:
            found[m] = taken
    return found


def kto_kl_batches(
    batches: Sequence[Batch],
    shape: PaddingShape,
    max_length: int,
    uniform: bool = False,
    answers: Sequence[Sequence[Document | None]] | None = None,
) -> list[Batch]:
    """A step's micro-batches of examples, each with the completion of another example, cut to `max_length` from the
    right.

    `answers`: for each example of each micro-batch, the document that the completion is taken from; unset: the example
    before it in its micro-batch. An example whose answer is None is left out of `fields["examples"]`. A document keeps
    the sample id of its prompt. One that is cut within its prompt is left without a label.
    """
    split = [split_batch_into_documents(batch) for batch in batches]
    if answers is None:
        answers = [[*d[-1:], *d[:-1]] for d in _examples(batches, split)]
    mismatched: list[Sequence[Document | None]] = []
    counted: list[Tensor] = []
    for batch, own_documents, others in zip(batches, split, answers, strict=True):
        documents: list[Document | None] = [d if len(d[0]) else None for d in own_documents]
        examples = batch.fields["examples"]
        for i, answer in zip(examples.tolist(), others, strict=True):
            if answer is not None:
                documents[i] = _with_completion_of(own_documents[i], answer, max_length)
        mismatched.append(documents)
        counted.append(examples[torch.tensor([a is not None for a in others], dtype=torch.bool)])
    laid = collate_preferences(mismatched, batches[0].cu_seqlens is not None, shape, uniform)
    return [replace(b, fields={"examples": examples}) for b, examples in zip(laid, counted, strict=True)]


def _with_completion_of(prompt: Document, answer: Document, max_length: int) -> Document:
    begin = first_labeled_token(prompt[1])
    other = first_labeled_token(answer[1])
    ids = np.concatenate([prompt[0][:begin], answer[0][other:]])[:max_length]
    mask = np.concatenate([np.zeros(begin, np.uint8), answer[1][other:]])[:max_length]
    return ids, mask, prompt[2]
