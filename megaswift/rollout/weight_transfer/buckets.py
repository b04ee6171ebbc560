"""Buckets of weights: many tensors in one buffer of bytes, described by a header of plain JSON.

Owns packing, unpacking, checksums, and the choice of what has changed since the last sync. Needs torch only: samplers
import it too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

BUCKET_BYTES = 1 << 30
"""Capacity of a bucket; a larger tensor has a bucket of its own size."""
_ALIGNMENT = 16
"""Bytes; of every tensor in a bucket, a multiple of every dtype's size."""
_WORDS = 1 << 22
"""Words of 8 bytes that are summed at once."""
_IN_LAYER = re.compile(r"^(.*\.\d+\.[^.]+(?:\.[^.]+)*)\.[^.]+\.[^.]+$")
_EXPERTS = re.compile(r"^(.*\.experts)\.\d+\.")


@dataclass(frozen=True)
class TensorInBucket:
    """Where a tensor lies in a bucket."""

    name: str
    """Hugging Face's."""
    dtype: str
    """Without `torch.`."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the beginning of the bucket."""
    nbytes: int
    checksum: int | None = None
    """`tensor_checksum`; None: not asked for."""

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> TensorInBucket:
        """The inverse of `to_json`."""
        name, dtype, shape, offset, nbytes, checksum = values
        return cls(name, dtype, tuple(shape), offset, nbytes, checksum)

    def to_json(self) -> list[Any]:
        """Values that JSON has."""
        return [self.name, self.dtype, list(self.shape), self.offset, self.nbytes, self.checksum]


def tensor_checksum(tensor: Tensor) -> int:
    """64 bits of a tensor's bytes, on its own device; the same on every device. Values and their places both count: the
    sum of each word and its index mixed as in SplitMix64 (Steele, Lea and Flood 2014), modulo 2^64, in blocks."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = data[: data.numel() // 8 * 8]
    total = sum(int(byte) << (8 * i) for i, byte in enumerate(data[words.numel() :].tolist()))
    if words.storage_offset() % 8 or words.data_ptr() % 8:  # a slice of bytes may start anywhere
        words = words.clone()
    words = words.view(torch.int64)
    for start in range(0, words.numel(), _WORDS):
        block = words[start : start + _WORDS]
        mixed = torch.arange(1, block.numel() + 1, device=data.device) * -7046029254386353131 + block
        for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
            mixed = (mixed ^ (mixed >> shift)) * factor
        total = total * 6364136223846793005 + int(mixed.sum())
    return total % (1 << 64)


def state_digest(checksums: dict[str, int]) -> str:
    """One value for all weights of a model, whatever their order."""
    lines = (f"{name} {checksum}\n" for name, checksum in sorted(checksums.items()))
    return sha256("".join(lines).encode()).hexdigest()


@dataclass
class BucketPacker:
    """Fills buckets with a stream of weights."""

    buffer: Callable[[int], Tensor]
    """A buffer of at least that many bytes (uint8), free to be written."""
    capacity: int = BUCKET_BYTES
    _entries: list[TensorInBucket] = field(default_factory=list)
    _held: list[Tensor] = field(default_factory=list)
    _size: int = 0

    def pack(self, weights: Iterable[tuple[str, Tensor, int | None]]) -> Iterator[tuple[list[TensorInBucket], Tensor]]:
        """(Entries, bytes) of each bucket, for (name, tensor, checksum) in order. The bytes are overwritten once the
        buffer is given again."""
        for name, tensor, checksum in weights:
            if self._held and self._size + tensor.nbytes > self.capacity:
                yield self._close()
            dtype = str(tensor.dtype).removeprefix("torch.")
            shape = tuple(tensor.shape)
            self._entries.append(TensorInBucket(name, dtype, shape, self._size, tensor.nbytes, checksum))
            self._held.append(tensor)
            self._size = -(-(self._size + tensor.nbytes) // _ALIGNMENT) * _ALIGNMENT
        if self._held:
            yield self._close()

    def _close(self) -> tuple[list[TensorInBucket], Tensor]:
        payload = self.buffer(self._size)[: self._size]
        for entry, tensor in zip(self._entries, self._held, strict=True):
            data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            payload[entry.offset : entry.offset + entry.nbytes].copy_(data)
        entries = self._entries
        self._entries = []
        self._held = []
        self._size = 0
        return entries, payload


def unpack_bucket(entries: Iterable[TensorInBucket], payload: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(Name, tensor) of each entry: views of `payload`."""
    for entry in entries:
        data = payload[entry.offset : entry.offset + entry.nbytes]
        yield entry.name, data.view(getattr(torch, entry.dtype)).view(entry.shape)


def module_of_weight(name: str) -> str:
    """The module whose weights a sampler may hold fused (q, k and v; gate and up; all experts of a layer), so that they
    are sent together or not at all: what has the weight within a layer (`self_attn`, `mlp`), else the weight's own
    module."""
    if match := _EXPERTS.match(name):
        return match.group(1)
    if match := _IN_LAYER.match(name):
        return match.group(1)
    return name.rpartition(".")[0]


@dataclass
class ChangedWeights:
    """What the samplers have, and what of the trainer's weights they need."""

    sent: dict[str, int] = field(default_factory=dict)
    """Name -> checksum of what the samplers have; empty: nothing is known about them, and everything is sent."""
    current: dict[str, int] = field(default_factory=dict)
    """The same of the stream that passes."""
    scattered: set[str] = field(default_factory=set)
    """Modules whose weights did not arrive one after another; they are always sent, because a part of a fused module
    would replace all of it."""

    def select(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor, int]]:
        """(Name, tensor, checksum) of every module with a change. The order of names is the same in every stream."""
        self.current = {}
        closed: set[str] = set()
        for module, members in itertools.groupby(weights, lambda item: module_of_weight(item[0])):
            held = [(name, tensor, tensor_checksum(tensor)) for name, tensor in members]
            self.current |= {name: checksum for name, _, checksum in held}
            if module in closed:
                self.scattered.add(module)
            closed.add(module)
            if module in self.scattered or any(self.sent.get(name) != checksum for name, _, checksum in held):
                yield from held
