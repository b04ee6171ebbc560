"""A teacher's largest log-probabilities in micro-batches, wherever they come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from megaswift.engine.divergence import IDS_FIELD, LOGPROBS_FIELD
from megaswift.engine.objective import label_positions
from megaswift.losses.contract import Batch
from megaswift.parallel.layout import Layout
from megaswift.trainers.distillation.exchange import Key


class TeacherSource(Protocol):
    """Adds to micro-batches what a divergence from the teacher reads."""

    def add(self, batches: Sequence[Batch], training: bool) -> list[Batch]:
        """Return this rank's micro-batches with the fields of the teacher. Collective."""


@dataclass(frozen=True)
class Largest:
    """The largest log-probabilities of some positions and their tokens, [n, k] each; -inf where there are fewer."""

    logprobs: Tensor
    """float32."""
    ids: Tensor
    """int32."""

    def __getitem__(self, rows: slice) -> Largest:
        return Largest(self.logprobs[rows], self.ids[rows])

    @classmethod
    def joined(cls, parts: Sequence[Largest], k: int) -> Largest:
        """Return the positions of all parts, in order."""
        logprobs = [torch.zeros(0, k), *(part.logprobs for part in parts)]
        ids = [torch.zeros(0, k, dtype=torch.int32), *(part.ids for part in parts)]
        return cls(torch.cat(logprobs), torch.cat(ids))

    def packed(self) -> Tensor:
        """Return both as uint8 [n x k x 8]."""
        both = [self.logprobs.contiguous().view(-1), self.ids.contiguous().view(-1)]
        return torch.cat([part.view(torch.uint8) for part in both])

    @classmethod
    def unpacked(cls, packed: Tensor, k: int) -> Largest:
        """Return what `packed` was given."""
        logprobs, ids = (part.contiguous() for part in packed.view(2, -1).unbind())
        return cls(logprobs.view(torch.float32).view(-1, k), ids.view(torch.int32).view(-1, k))


def with_largest(batch: Batch, largest: Largest) -> Batch:
    """Return the micro-batch with the fields of the numbers at its labels, in the order of the labels."""
    k = largest.logprobs.shape[1]
    device = largest.logprobs.device
    positions = label_positions(batch).to(device)
    whole = batch.input_ids.numel()
    logprobs = torch.zeros(whole, k, device=device).index_copy(0, positions, largest.logprobs)
    ids = torch.zeros(whole, k, dtype=torch.int64, device=device).index_copy(0, positions, largest.ids.long())
    shape = (*batch.input_ids.shape, k)
    fields = {LOGPROBS_FIELD: logprobs.view(shape), IDS_FIELD: ids.view(shape)}
    return replace(batch, fields={**batch.fields, **fields})


def document_spans(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """Yield (row, first position, end) of each document of a micro-batch in host memory, without its padding."""
    edges = None if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
    for row, valid in enumerate(batch.valid):
        bounds = [0, len(valid)] if edges is None else edges
        for start, end in zip(bounds[:-1], bounds[1:], strict=True):
            length = int(valid[start:end].sum())
            if length:
                yield row, start, start + length


def last_stage_of_replica(layout: Layout, dp: int) -> list[int]:
    """Return the ranks of the last pipeline stage of a data-parallel replica."""
    places = ((rank, layout.coordinates(rank)) for rank in range(layout.world_size))
    return [rank for rank, place in places if place.dp == dp and place.pp == layout.pp - 1]


def sources_from_first_ranks(layout: Layout, count: int) -> dict[Key, int]:
    """Return the rank that sends the numbers of each micro-batch to each rank of the last stage that has it: the first
    of the replica."""
    return {
        (dp * count + i, target): layout.rank(dp=dp)
        for dp in range(layout.dp)
        for target in last_stage_of_replica(layout, dp)
        for i in range(count)
    }
