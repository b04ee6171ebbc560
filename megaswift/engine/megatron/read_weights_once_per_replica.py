"""Reads each slice of a model's files on one data-parallel replica and broadcasts it to the others.

Owns which replica reads what: in turn, so that all read at the same time, each a share. Which slices a rank needs and
what is done with them is `load_and_gather_rank_weights`'.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaswift import distributed
from megaswift.bridge.hf_megatron_weight_plan import PlanEntry
from megaswift.engine.megatron.local_param import LocalParam, splitting_ranks
from megaswift.engine.megatron.parallel_context import ParallelContext
from megaswift.errors import Problem, UserError, WeightsError

READ_AHEAD = 1 << 26
"""Bytes that a replica reads before it sends: beside these, one tensor is held."""


def read_once_per_replica(
    parameters: Sequence[LocalParam], padded: int, context: ParallelContext, source: Any
) -> Iterator[tuple[LocalParam, Tensor]]:
    """(parameter, value in the file's dtype) of all parameters of this rank. Collective; WeightsError on every rank
    where one cannot read, after the last parameter.

    Args:
        parameters: All of this rank.
        padded: Rows of the padded vocabulary.
    """
    problems: list[Problem] = []
    for window in _windows(parameters, padded, context, source):
        own: dict[int, Tensor] = {}
        for number, placed in enumerate(window):
            group = replica_group(placed.entry, context)
            dtype = _dtype(placed.entry, source)
            if number % group.size() != group.rank():
                continue
            ranks, rank = splitting_ranks(placed.entry, context)
            try:
                own[number] = placed.entry.read(source, ranks, rank, padded).to(dtype)
            except UserError as error:  # the others wait for this tensor
                problems += error.problems
                own[number] = torch.zeros(_shape(placed.entry, padded, context), dtype=dtype)
        for number, placed in enumerate(window):
            group = replica_group(placed.entry, context)
            value = own.pop(number, None)
            if group.size() > 1:
                if value is None:
                    shape = _shape(placed.entry, padded, context)
                    dtype = _dtype(placed.entry, source)
                    value = torch.empty(tuple(shape), dtype=dtype, device=context.device)
                value = _broadcast(value.to(context.device), group, number % group.size())
            assert value is not None
            yield placed, value
    distributed.raise_on_all_ranks(problems, WeightsError)


def replica_group(entry: PlanEntry, context: ParallelContext) -> Any:
    """The ranks that hold the same slice of this entry."""
    return context.groups.dp_cp if entry.expert is None else context.groups.expt_dp


def _windows(
    parameters: Sequence[LocalParam], padded: int, context: ParallelContext, source: Any
) -> Iterator[list[LocalParam]]:
    """Parameters in order, so many at a time that a replica reads about READ_AHEAD bytes of them; the same on all
    replicas."""
    window: list[LocalParam] = []
    size = 0.0
    for placed in parameters:
        window.append(placed)
        shape = _shape(placed.entry, padded, context)
        dtype = _dtype(placed.entry, source)
        size += math.prod(shape) * dtype.itemsize / replica_group(placed.entry, context).size()
        if size >= READ_AHEAD:
            yield window
            window = []
            size = 0.0
    yield window


def _shape(entry: PlanEntry, padded: int, context: ParallelContext) -> Sequence[int]:
    return entry.shard_shape(splitting_ranks(entry, context)[0], padded)


def _dtype(entry: PlanEntry, source: Any) -> torch.dtype:
    """The dtype of the result of `entry.read`: that of all its parts put together."""
    return functools.reduce(torch.promote_types, [source.dtype(name) for name in entry.hf])


def _broadcast(value: Tensor, group: Any, reader: int) -> Tensor:
    """The value of the replica that has read it. As bytes: gloo does not know all dtypes."""
    value = value.contiguous()
    dist.broadcast(value.view(-1).view(torch.uint8), group=group, group_src=reader)
    return value
