"""Reads each tensor of a model's or a checkpoint's files on one rank and broadcasts it to the others.

Owns who reads what: in turn, so that all ranks read at the same time, each a share. What becomes of a tensor is
`weights`'s and `checkpoint`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megaswift import distributed
from megaswift.bridge.hf.source import WeightSource
from megaswift.errors import Problem, UserError, WeightsError

READ_AHEAD = 1 << 25
"""Bytes that a rank reads before it sends, or one tensor: beside these, one tensor is held. Pages of the file count as
often, until the system takes them back."""


class RankAndDevice(Protocol):
    """Who reads, and where tensors are sent."""

    rank: int
    device: torch.device


def read_tensors_once_over_ranks(
    source: WeightSource, names: Sequence[str], context: RankAndDevice
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor in the file's dtype) in order; with several ranks on the run's device. Collective;
    WeightsError on every rank where one cannot read, after the last tensor."""
    world = distributed.global_world_size()
    problems = list[Problem]()
    if world == 1:
        yield from ((name, source.slice(name)) for name in names)
        return
    for window in _windows(source, names, world):
        own: dict[str, Tensor] = {}
        for name in window[context.rank :: world]:
            try:
                own[name] = source.slice(name).to(source.dtype(name))
            except UserError as error:  # the others wait for this tensor
                problems += error.problems
                own[name] = torch.zeros(source.shape(name), dtype=source.dtype(name))
        for number, name in enumerate(window):
            yield name, _broadcast(own.pop(name, None), source, name, number % world, context.device)
    distributed.raise_on_all_ranks(problems, WeightsError)


def _windows(source: WeightSource, names: Sequence[str], world: int) -> Iterator[list[str]]:
    """So many names at a time that a rank reads about READ_AHEAD bytes of them, at least one; the same on all."""
    window: list[str] = []
    size = 0
    for name in names:
        window.append(name)
        size += math.prod(source.shape(name)) * source.dtype(name).itemsize
        if size >= READ_AHEAD * world and len(window) >= world:
            yield window
            window = []
            size = 0
    yield window


def _broadcast(value: Tensor | None, source: WeightSource, name: str, reader: int, device: torch.device) -> Tensor:
    """The tensor of the rank that has read it. As bytes: gloo does not know all dtypes."""
    if value is None:
        value = torch.empty(source.shape(name), dtype=source.dtype(name), device=device)
    value = value.to(device).contiguous()
    dist.broadcast(value.view(-1).view(torch.uint8), reader)
    return value
