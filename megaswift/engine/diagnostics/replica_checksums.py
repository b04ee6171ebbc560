"""Compares the weights of data-parallel replicas, which have to be equal bit by bit after every step.

Each tensor becomes two 64-bit sums over its 32-bit words, one of them weighted by position, so that a flipped bit or
two exchanged words show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK = 1 << 22
"""Words that are widened at a time: 32 MiB."""
PERIOD = 65521
"""Weights repeat after so many words: the weighted sum does not overflow below 2^16 x 2^31 x 2^16 words."""


@dataclass(frozen=True)
class ReplicatedWeights:
    """Tensors that every rank of a process group holds."""

    group: Any
    names: Sequence[str]
    tensors: Sequence[Tensor]


@dataclass(frozen=True)
class ReplicaDifference:
    """A tensor whose values are not the same on all ranks."""

    name: str
    odd: tuple[int, ...]
    """Global ranks whose values most of the others do not have."""
    others: tuple[int, ...]


def tensor_checksums(tensor: Tensor) -> Tensor:
    """Return the plain and the weighted sum of a tensor's 32-bit words, modulo 2^64: int64 [2] on its device."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    rest = raw.numel() % 4
    words = raw[: raw.numel() - rest].view(torch.int32)
    sums = torch.zeros(2, dtype=torch.int64, device=raw.device)
    for start in range(0, words.numel(), CHUNK):
        chunk = words[start : start + CHUNK].long()
        places = torch.arange(start, start + chunk.numel(), device=raw.device) % PERIOD + 1
        sums += torch.stack((chunk.sum(), (chunk * places).sum()))
    if rest:
        sums += raw[raw.numel() - rest :].long().sum()
    return sums


def replica_differences(replicated: Iterable[ReplicatedWeights]) -> list[ReplicaDifference]:
    """Return the tensors that differ between ranks of their group; the same on every rank of it. Collective."""
    differences: list[ReplicaDifference] = []
    for part in replicated:
        ranks = dist.get_process_group_ranks(part.group)
        if len(ranks) < 2 or not part.tensors:
            continue
        own = torch.stack([tensor_checksums(tensor) for tensor in part.tensors])
        flat = own.new_empty(len(ranks) * len(own), 2)
        dist.all_gather_into_tensor(flat, own, group=part.group)
        gathered = flat.view(len(ranks), len(own), 2)
        for i in (gathered != gathered[:1]).any(dim=2).any(dim=0).nonzero().flatten().tolist():
            differences.append(_difference(part.names[i], ranks, [tuple(sums) for sums in gathered[:, i].tolist()]))
    return differences


def replicated_by_group(named: Iterable[tuple[str, Tensor]], group: Any, expert_group: Any) -> list[ReplicatedWeights]:
    """Group Megatron-Core's parameters by the ranks over which their gradients are summed.

    `allreduce` is False on experts.
    """
    dense: dict[str, Tensor] = {}
    experts: dict[str, Tensor] = {}
    for name, parameter in named:
        (dense if getattr(parameter, "allreduce", True) else experts)[name] = _stored_values(parameter)
    return [
        ReplicatedWeights(which, [*held], [*held.values()])
        for which, held in ((group, dense), (expert_group, experts))
        if held
    ]


def _stored_values(parameter: Any) -> Tensor:
    """A parameter's memory; of Transformer Engine's FP8 weights the 8-bit values."""
    for name in ("_rowwise_data", "_data"):
        if isinstance(values := getattr(parameter, name, None), Tensor):
            return values
    return parameter.data


def _difference(name: str, ranks: Sequence[int], sums: Sequence[tuple[int, ...]]) -> ReplicaDifference:
    usual, _ = Counter(sums).most_common(1)[0]
    odd = tuple(rank for rank, value in zip(ranks, sums, strict=True) if value != usual)
    return ReplicaDifference(name, odd, tuple(rank for rank in ranks if rank not in odd))
