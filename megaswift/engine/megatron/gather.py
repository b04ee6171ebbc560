"""Gathers tensors of which ranks hold shards: many tensors at a time, in one flat buffer for each sender.

Owns which rank sends which shards to which ranks, and where shards lie in a buffer. Every rank derives both from
shapes, dtypes and the layout, so nothing but values is sent. What the tensors are is up to `weights` and `lora/`.

A bucket holds tensors of one pipeline stage. If every rank receives them, the stage's ranks broadcast what they hold to
the other stages, then tensor-parallel ranks gather theirs and expert-parallel ranks theirs: each replica within itself,
since replicas hold the same dense weights. Otherwise each rank that holds a shard sends it straight to the receivers of
its own replica (of its own expert-parallel group for experts).
"""

from __future__ import annotations

import datetime
import functools
import itertools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megaswift import distributed
from megaswift.engine.buckets import aligned, bucket_size, filled
from megaswift.engine.megatron.parallel_context import ParallelContext
from megaswift.engine.protocol import Receivers
from megaswift.parallel.layout import Layout

K = TypeVar("K")
T = TypeVar("T")
Key = tuple[int, int]
"""(Number of the tensor in its bucket, number of the shard)."""


@dataclass(frozen=True)
class Route:
    """The ranks to which gathered tensors go."""

    to: Receivers | int = "rank0"
    """A number is one rank's."""
    device: torch.device | None = None
    """The ranks' device: tensors stay there, and are sent by its communication. None: they go through host memory, to
    one rank."""
    hours: float | None = None
    """How long ranks wait for one another at most, for one that writes meanwhile; None: as long as for a collective. A
    rank that has ended is noticed at once."""

    def receivers(self, layout: Layout) -> frozenset[int]:
        """Return the ranks that get tensors."""
        if isinstance(self.to, int):
            return frozenset({self.to})
        if self.to == "rank0":
            return frozenset({0})
        dense = [layout.coordinates(rank) for rank in range(layout.world_size)]
        return frozenset(rank for rank, at in enumerate(dense) if self.to == "all" or at.tp == at.pp == at.cp == 0)


TO_RANK0 = Route()


@dataclass(frozen=True)
class ShardedTensor:
    """A tensor of which ranks of one pipeline stage hold shards."""

    stage: int
    expert_rank: int | None
    """The expert-parallel rank that holds it; None: it belongs to no expert."""
    shapes: tuple[tuple[int, ...], ...]
    """The shape on each tensor-parallel rank (of an expert, on each expert-tensor-parallel rank); a single shape if all
    of them hold the same values."""
    dtype: torch.dtype
    read: Callable[[], Tensor | None]
    """Returns this rank's shard, or None for zeros. Called only on ranks that hold one."""
    collective: bool = False
    """Whether `read` is collective over replicas, so that each has to call it."""

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(map(math.prod, self.shapes)) * self.dtype.itemsize


class Buffer:
    """The places of some shards in a flat buffer of bytes."""

    def __init__(self, shards: Iterable[tuple[Key, ShardedTensor]]) -> None:
        self.places: dict[Key, tuple[int, int, tuple[int, ...], torch.dtype]] = {}
        self.size = 0
        for key, tensor in shards:
            shape = tensor.shapes[key[1]]
            end = self.size + math.prod(shape) * tensor.dtype.itemsize
            self.places[key] = self.size, end, shape, tensor.dtype
            self.size = aligned(end)

    def views(self, flat: Tensor) -> dict[Key, Tensor]:
        """Return the shards in a buffer of this size."""
        return {key: flat[start:end].view(dtype).view(shape) for key, (start, end, shape, dtype) in self.places.items()}


@dataclass(frozen=True)
class Bucket(Generic[T]):
    """Tensors that are gathered together."""

    jobs: Sequence[tuple[T, Sequence[ShardedTensor]]]
    """(What the tensors are for, the tensors)."""

    @cached_property
    def tensors(self) -> list[ShardedTensor]:
        """All of them, in order."""
        return [tensor for _, tensors in self.jobs for tensor in tensors]

    @property
    def stage(self) -> int:
        """The pipeline stage that holds them."""
        return self.tensors[0].stage

    def replicated(self) -> list[Key]:
        """Return the shards that all tensor-parallel ranks hold."""
        return [(i, 0) for i, t in enumerate(self.tensors) if t.expert_rank is None and len(t.shapes) == 1]

    def dense(self, tp: int) -> list[Key]:
        """Return the shards that one tensor-parallel rank holds."""
        return [(i, tp) for i, t in enumerate(self.tensors) if t.expert_rank is None and len(t.shapes) > 1]

    def expert(self, ep: int, etp: int) -> list[Key]:
        """Return the experts' shards that one rank holds; replicated ones of its first expert-tensor-parallel rank
        only."""
        return [(i, etp) for i, t in enumerate(self.tensors) if t.expert_rank == ep and etp < len(t.shapes)]

    def buffer(self, keys: Iterable[Key]) -> Buffer:
        """Return the places of shards in a buffer."""
        return Buffer((key, self.tensors[key[0]]) for key in keys)


def buckets(jobs: Iterable[tuple[T, Sequence[ShardedTensor]]], limit: int) -> Iterator[Bucket[T]]:
    """Yield consecutive jobs whose tensors lie on one stage and have at most `limit` bytes; a larger job alone."""

    def stage(job: tuple[T, Sequence[ShardedTensor]]) -> int:
        (number,) = {tensor.stage for tensor in job[1]}  # one stage holds what is made into one tensor
        return number

    for _, of_stage in itertools.groupby(jobs, stage):
        for held in filled(of_stage, lambda job: sum(tensor.nbytes for tensor in job[1]), limit):
            yield Bucket(held)


def gather(
    jobs: Iterable[tuple[T, Sequence[ShardedTensor]]], context: ParallelContext, route: Route
) -> Iterator[tuple[T, list[list[Tensor]]]]:
    """Yield each job with the shards of its tensors, where `route` leads; nothing on other ranks.

    Collective: every rank iterates to the end. Shards lie in the parameters' memory or in buffers of their bucket. A
    buffer is freed when no shard in it is held: a consumer keeps one bucket by its last tensor while the next is
    gathered.
    """
    exchange = _Exchange(context, route)
    for bucket in buckets(jobs, bucket_size(exchange.device)):
        shards = exchange.run(bucket)
        number = 0
        for job, tensors in bucket.jobs if context.rank in exchange.receivers else ():
            yield job, [[shards[number + i, j] for j in range(len(t.shapes))] for i, t in enumerate(tensors)]
            number += len(tensors)
        del shards  # before the next bucket is gathered


class Share(NamedTuple):
    """Which of its shards a rank sends to a receiver."""

    replicated: bool
    dense: bool
    expert: bool


@functools.cache
def _group(layout: Layout, axes: str, rank: int) -> tuple[int, ...]:
    return tuple(layout.group(axes, rank))


class _Exchange:
    """One rank's part in the exchange of buckets."""

    def __init__(self, context: ParallelContext, route: Route) -> None:
        self.layout = context.layout
        self.rank = context.rank
        self.at = context.coordinates
        self.groups = context.groups
        self.own_device = context.device
        self.on_device = route.device is not None
        self.device = route.device or torch.device("cpu")
        self.hours = route.hours
        self.receivers = route.receivers(self.layout)
        self.all = len(self.receivers) == self.layout.world_size
        # None: the default group
        self.group = None if self.on_device else distributed.cpu_group()
        assert not self.all or self.device.type == self.own_device.type or self.layout.world_size == 1, (
            "host memory is for one rank"
        )
        if self.on_device and not self.all:
            # NCCL connects a group in the first call, in which all ranks have to take part: messages are some ranks'.
            dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)

    def run(self, bucket: Bucket[Any]) -> dict[Key, Tensor]:
        """Return the bucket's shards on receivers, any or none of them elsewhere."""
        return self._collectives(bucket) if self.all else self._messages(bucket)

    def _flat(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def _read(
        self, bucket: Bucket[Any], buffers: Sequence[Mapping[Key, Tensor]], kept: Container[Key]
    ) -> dict[Key, Tensor]:
        """Read this rank's shards into the buffers that have places for them; return those of `kept`, in the
        parameters' memory where they lie there."""
        found: dict[Key, Tensor] = {}
        for number, tensor in enumerate(bucket.tensors):
            if tensor.stage != self.at.pp or tensor.expert_rank not in (None, self.at.ep):
                continue
            place = self.at.tp if tensor.expert_rank is None else self.at.etp
            key = (number, 0 if len(tensor.shapes) == 1 else place)
            targets = [views[key] for views in buffers if key in views]
            if not (targets or key in kept or tensor.collective):
                continue
            value = tensor.read()
            shape = tensor.shapes[key[1]]
            if value is None:
                value = torch.zeros(shape, dtype=tensor.dtype, device=self.own_device)
            assert (tuple(value.shape), value.dtype) == (shape, tensor.dtype), (
                f"{tuple(value.shape)} {value.dtype}, announced as {shape} {tensor.dtype}"
            )
            for target in targets:
                target.copy_(value.detach())
            if key in kept:
                found[key] = value.detach().to(self.device).contiguous()
        return found

    # Every rank receives.

    def _collectives(self, bucket: Bucket[Any]) -> dict[Key, Tensor]:
        layout = self.layout
        piped = layout.pp > 1
        experts = layout.ep * layout.etp
        # What this rank holds, or a rank in its place of another stage; what no rank lacks is not copied.
        kinds = [
            (bucket.replicated(), piped),
            (bucket.dense(self.at.tp), piped or layout.tp > 1),
            (bucket.expert(self.at.ep, self.at.etp), piped or experts > 1),
        ]
        kept = {key for keys, moves in kinds if not moves for key in keys}
        buffers = [bucket.buffer(keys if moves else ()) for keys, moves in kinds]
        flat = self._flat(sum(buffer.size for buffer in buffers))
        parts = flat.split([buffer.size for buffer in buffers])
        views = [buffer.views(part) for buffer, part in zip(buffers, parts, strict=True)]
        found = self._read(bucket, views, kept)
        if piped and flat.numel():
            dist.broadcast(flat, group=self.groups.pp, group_src=bucket.stage)
        # What the other ranks of this stage hold.
        found |= views[0]
        if layout.tp > 1:
            found |= self._shared(self.groups.tp, parts[1], [bucket.dense(tp) for tp in range(layout.tp)], bucket)
        else:
            found |= views[1]
        if experts > 1:
            places = [(ep, etp) for ep in range(layout.ep) for etp in range(layout.etp)]
            found |= self._shared(self.groups.tp_ep, parts[2], [bucket.expert(*place) for place in places], bucket)
        else:
            found |= views[2]
        return found

    def _shared(self, group: Any, own: Tensor, keys: Sequence[list[Key]], bucket: Bucket[Any]) -> dict[Key, Tensor]:
        """Return the shards of all ranks of a group, of which each has its own in a buffer."""
        buffers = [bucket.buffer(of_rank) for of_rank in keys]
        sizes = [buffer.size for buffer in buffers]
        if len(set(sizes)) == 1:
            whole = self._flat(sum(sizes))
            rows = whole.split(sizes)
            if sizes[0]:
                dist.all_gather_into_tensor(whole, own, group=group)
        else:
            rows = tuple(own if n == group.rank() else self._flat(size) for n, size in enumerate(sizes))
            works = [
                dist.broadcast(row, group=group, group_src=n, async_op=True) for n, row in enumerate(rows) if len(row)
            ]
            for work in works:
                work.wait()
        return {key: view for buffer, row in zip(buffers, rows, strict=True) for key, view in buffer.views(row).items()}

    # Some ranks receive.

    def _messages(self, bucket: Bucket[Any]) -> dict[Key, Tensor]:
        stage = bucket.stage
        # What this rank sends: one buffer for each different share.
        targets = self._targets if stage == self.at.pp else {}
        outgoing: dict[Share, tuple[Buffer, Tensor]] = {}
        for share in targets.values():
            if share not in outgoing:
                buffer = bucket.buffer(self._keys(bucket, self.rank, share))
                outgoing[share] = buffer, self._flat(buffer.size)
        receives = self.rank in self.receivers
        kept = {(i, j) for i, t in enumerate(bucket.tensors) if receives for j in range(len(t.shapes))}
        found = self._read(bucket, [buffer.views(flat) for buffer, flat in outgoing.values()], kept)
        operations = [
            dist.P2POp(dist.isend, outgoing[share][1], to, self.group)
            for to, share in targets.items()
            if outgoing[share][0].size
        ]
        # What it receives.
        incoming: list[tuple[Buffer, Tensor]] = []
        for source, share in self._sources[stage].items() if receives else ():
            buffer = bucket.buffer(self._keys(bucket, source, share))
            if buffer.size:
                incoming.append((buffer, self._flat(buffer.size)))
                operations.append(dist.P2POp(dist.irecv, incoming[-1][1], source, self.group))
        self._exchange(operations)
        for buffer, flat in incoming:
            found |= buffer.views(flat)
        return found

    def _exchange(self, operations: list[dist.P2POp]) -> None:
        if not operations:
            return
        if self.on_device:
            # One batch: alone, each pair of ranks would make a communicator of its own in NCCL.
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            return
        works = [one.op(one.tensor, one.peer, group=self.group) for one in operations]
        with nullcontext() if self.hours is None else distributed.waiting_for([one.peer for one in operations]):
            for work in works:
                if self.hours is None:
                    work.wait()
                else:
                    work.wait(datetime.timedelta(hours=self.hours))

    def _keys(self, bucket: Bucket[Any], rank: int, share: Share) -> list[Key]:
        """Return the shards in the buffer that `rank` sends."""
        at = self.layout.coordinates(rank)
        keys = bucket.replicated() if share.replicated else []
        keys += bucket.dense(at.tp) if share.dense else []
        return keys + (bucket.expert(at.ep, at.etp) if share.expert else [])

    def _share(self, sender: int, receiver: int) -> Share:
        """Return what `sender` sends to `receiver`: its part of the dense weights to its own replica, where the first
        tensor-parallel rank sends what all of them hold; its experts to its own expert-parallel group."""
        there = self._in_stage(receiver, self.layout.coordinates(sender).pp)
        of_replica = sender in _group(self.layout, "tp", there)
        first = of_replica and self.layout.coordinates(sender).tp == 0 and there != receiver
        return Share(first, of_replica, sender in _group(self.layout, "etp-ep", there))

    def _in_stage(self, rank: int, stage: int) -> int:
        """Return the rank in this rank's place of another pipeline stage."""
        ranks = self.layout.world_size // self.layout.pp
        return stage * ranks + rank % ranks

    def _beside(self, rank: int) -> set[int]:
        return {*_group(self.layout, "tp", rank), *_group(self.layout, "etp-ep", rank)}

    @cached_property
    def _targets(self) -> dict[int, Share]:
        """The shares that this rank sends, by receiver."""
        places = {rank for stage in range(self.layout.pp) for rank in self._beside(self._in_stage(self.rank, stage))}
        return {rank: self._share(self.rank, rank) for rank in sorted(places & self.receivers - {self.rank})}

    @cached_property
    def _sources(self) -> list[dict[int, Share]]:
        """The shares that this rank receives of each stage's ranks, by sender."""
        places = [self._beside(self._in_stage(self.rank, stage)) - {self.rank} for stage in range(self.layout.pp)]
        return [{rank: self._share(rank, self.rank) for rank in sorted(of_stage)} for of_stage in places]


def merged_dtypes(own: Mapping[K, torch.dtype], layout: Layout) -> dict[K, torch.dtype]:
    """Return the dtypes of what any rank holds, by name. Collective if stages or experts are spread over ranks, which
    then hold other tensors."""
    if layout.pp == layout.ep == 1:
        return dict(own)
    found: dict[K, torch.dtype] = {}
    for of_rank in distributed.all_gather_objects(dict(own)):
        for name, dtype in of_rank.items():
            assert found.setdefault(name, dtype) == dtype, f"{name} is {dtype} and {found[name]}"
    return found
