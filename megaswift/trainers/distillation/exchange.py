"""Brings micro-batches to the ranks of a teacher that has a layout of its own, and its hidden states back.

A token costs the teacher's hidden size times the size of a number on the way back; its logits would cost the
vocabulary's size, about twenty to forty times as much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megaswift.losses.contract import Batch
from megaswift.parallel.layout import Layout

Key = tuple[int, int]
"""The number of a micro-batch, and the rank that gets something of it."""


@dataclass(frozen=True)
class Exchange:
    """Which ranks of the teacher compute which micro-batches of the student. The same on every rank.

    Micro-batches are numbered over the data-parallel ranks of the student, `count` for each. Each replica of the
    teacher takes as many consecutive ones as any other; the last is repeated where they do not come out even.
    """

    student: Layout
    teacher: Layout
    count: int

    @property
    def each(self) -> int:
        """Micro-batches of one replica of the teacher."""
        return -(-self.student.dp * self.count // self.teacher.dp)

    def taken(self, rank: int) -> list[int]:
        """Return the micro-batches that the teacher computes on `rank`, in order."""
        first = self.teacher.coordinates(rank).dp * self.each
        last = self.student.dp * self.count - 1
        return [min(number, last) for number in range(first, first + self.each)]

    def sources(self) -> dict[Key, int]:
        """Return the rank that sends a micro-batch to each rank of the teacher that computes it."""
        found = {}
        for rank in range(self.teacher.world_size):
            for number in set(self.taken(rank)):
                found[number, rank] = self.student.rank(dp=number // self.count)
        return found

    def results(self) -> dict[Key, int]:
        """Return the rank that sends the hidden states of a micro-batch to each rank of the student's last stage that
        has it: the rank itself, if it has computed them."""
        last = self.teacher.pp - 1
        computed: dict[int, list[int]] = {}
        for rank in range(self.teacher.world_size):
            if self.teacher.coordinates(rank).pp == last:
                for number in set(self.taken(rank)):
                    computed.setdefault(number, []).append(rank)
        found = {}
        for rank in range(self.student.world_size):
            place = self.student.coordinates(rank)
            if place.pp != self.student.pp - 1:
                continue
            for number in range(place.dp * self.count, (place.dp + 1) * self.count):
                owners = computed[number]
                found[number, rank] = rank if rank in owners else owners[rank % len(owners)]
        return found


def transfer(owned: Mapping[int, Tensor], sources: Mapping[Key, int], sizes: Mapping[int, int]) -> dict[int, Tensor]:
    """Send tensors between ranks, each as bytes. Collective.

    Args:
        owned: The tensors of this rank, by number.
        sources: The rank that sends, for each number and the rank that gets it.
        sizes: The bytes of each number.

    Returns:
        What this rank gets, uint8 on its device, by number. A tensor that it has itself is not sent.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = _device()
    got: dict[int, Tensor] = {}
    operations: list[dist.P2POp] = []
    for (number, target), source in sorted(sources.items()):
        if source == target == rank:
            got[number] = _bytes(owned[number]).to(device)
        elif source == rank:
            operations.append(dist.P2POp(dist.isend, _bytes(owned[number]).to(device), target))
        elif target == rank:
            got[number] = torch.empty(sizes[number], dtype=torch.uint8, device=device)
            operations.append(dist.P2POp(dist.irecv, got[number], source))
    operations = [operation for operation in operations if operation.tensor.numel()]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return got


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


SHAPE = ("rows", "length", "bounds", "prefixes", "labels")
"""The numbers that describe a micro-batch to other ranks."""


def shape_numbers(batch: Batch) -> list[int]:
    """Return the numbers `SHAPE` of a micro-batch."""
    rows, length = batch.input_ids.shape
    bounds = 0 if batch.cu_seqlens is None else len(batch.cu_seqlens)
    prefixes = 0 if batch.prefixes is None else len(batch.prefixes)
    return [rows, length, bounds, prefixes, int((batch.loss_weights != 0).sum())]


def batch_to_numbers(batch: Batch) -> Tensor:
    """Return what a teacher reads of a micro-batch as int64 [numbers]."""
    parts = [batch.input_ids, batch.labels, batch.positions, batch.valid, batch.loss_weights != 0]
    parts += [part for part in (batch.cu_seqlens, batch.prefixes) if part is not None]
    return torch.cat([part.reshape(-1).long() for part in parts])


def batch_from_numbers(numbers: Tensor, shape: Sequence[int]) -> Batch:
    """Return the micro-batch that `batch_to_numbers` was given, with weights of 1 at labels; `shape`: its
    `shape_numbers`."""
    rows, length, bounds, prefixes, _ = shape
    whole = rows * length
    *parts, rest = numbers.split([whole] * 5 + [bounds + prefixes])
    ids, labels, positions, valid, labeled = (part.view(rows, length) for part in parts)
    cu_seqlens, before = rest.split([bounds, prefixes])
    return Batch(
        ids,
        labels,
        labeled.float(),
        positions,
        valid.bool(),
        cu_seqlens=cu_seqlens.int() if bounds else None,
        prefixes=before if prefixes else None,
    )


def numbers_in(shape: Sequence[int]) -> int:
    """Return the length of `batch_to_numbers` of a micro-batch with these `shape_numbers`."""
    rows, length, bounds, prefixes, _ = shape
    return 5 * rows * length + bounds + prefixes
