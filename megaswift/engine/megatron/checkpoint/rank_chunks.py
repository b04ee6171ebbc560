"""The part of a checkpoint that this rank has: chunks of global tensors, whose names and shapes no layout changes.

Owns the map from Megatron's sharded state dicts to boxes. Names are the canonical ones: per-layer keys, experts stacked
in `mlp.experts.experts.*`, `optimizer.state.{exp_avg,exp_avg_sq,param}.<weight>`, as `fully_reshardable` writes them. A
rank of the distributed optimizer owns a flat range of a weight; that range is a few boxes of it, so nothing is
gathered. FP8 scaling histories (`_extra_state`) are `fp8_history`'s: Transformer Engine would unpickle them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory, is_main_replica
from torch import Tensor

from megaswift.bridge.checkpoint.chunk_files import RankTensorChunk, StatelessBox
from megaswift.bridge.checkpoint.entries import KEPT, STATES
from megaswift.engine.megatron.checkpoint import optimizer_states as states
from megaswift.engine.megatron.optim.fp8_weights import is_fp8_weight
from megaswift.engine.megatron.state import EngineState


@dataclass(frozen=True)
class LocalToGlobalSlice:
    """A run of a local tensor's elements, and where it lies in the named tensor."""

    key: str
    start: int
    """First element in the flat local tensor."""
    shape: tuple[int, ...]
    """With the dimensions of the named tensor."""
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    replica: tuple[int, ...]
    """Which copy of it this rank has: (pipeline, tensor, data) rank among the holders; all zero is the one that is
    written."""
    padded: bool

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.start + math.prod(self.shape)


def _piece(part: ShardedTensor, local: Tensor) -> LocalToGlobalSlice:
    assert part.data.is_contiguous() and part.data.untyped_storage().data_ptr() == local.untyped_storage().data_ptr(), (
        part.key
    )
    start = part.data.storage_offset() - local.storage_offset()
    shape = (1,) * part.prepend_axis_num + tuple(part.local_shape)
    replica = part.replica_id if isinstance(part.replica_id, tuple) else (part.replica_id,)
    return LocalToGlobalSlice(
        part.key, start, shape, tuple(part.global_shape), tuple(part.global_offset), replica, part.allow_shape_mismatch
    )


def local_to_global_tensor_slices(engine: EngineState) -> list[tuple[Tensor, list[LocalToGlobalSlice]]]:
    """Every weight and persistent buffer of this rank with its pieces (a gated projection has two)."""
    chunks = []
    for chunk in engine.plain:
        metadata = {"non_homogeneous_layers": True, "dp_cp_group": engine.context.groups.dp_cp}
        for base in nested_values(chunk.sharded_state_dict(metadata=metadata)):
            if isinstance(base, ShardedObject):
                assert base.key.endswith("_extra_state"), f"{base.key} is no tensor"
                continue
            weight = base.data
            if is_fp8_weight(weight):  # only where its elements lie is read from the copy
                base = dataclasses.replace(base, data=torch.empty(weight.shape, dtype=weight.dtype, device="meta"))
            parts = list(nested_values(base.build())) if isinstance(base, ShardedTensorFactory) else [base]
            chunks.append((weight, [_piece(part, base.data) for part in parts]))
    return chunks


def weight_chunks(placed: Sequence[tuple[Tensor, list[LocalToGlobalSlice]]], write: bool) -> Iterator[RankTensorChunk]:
    """The weights as boxes: all that this rank holds, or only what it has to write."""
    for local, parts in placed:
        flat = local.detach().view(-1)
        for p in parts:
            if not write or is_main_replica(p.replica):
                yield RankTensorChunk(p.key, p.whole, p.offset, flat[p.start : p.end].view(p.shape), p.padded)


def passthrough_hf_tensor_chunks(engine: EngineState) -> Iterator[RankTensorChunk]:
    """This rank's share of the tensors that are carried along unchanged, each read when it is written."""
    for name in engine.kept_names[engine.rank :: engine.layout.world_size]:
        source = engine.kept
        assert source is not None
        shape = source.shape(name)
        facts = torch.empty(shape, dtype=source.dtype(name), device="meta")
        yield RankTensorChunk(KEPT + name, shape, (0,) * len(shape), facts, read=functools.partial(source.slice, name))


def optimizer_chunks(
    placed: Sequence[tuple[Tensor, list[LocalToGlobalSlice]]], slices: Sequence[states.StateSlice], write: bool
) -> Iterator[RankTensorChunk]:
    """The optimizer's states as boxes, in the order of `slices`."""
    by_weight = {id(local): parts for local, parts in placed}
    for s in slices:
        for p in by_weight[id(s.weight)]:
            # data-parallel ranks own different ranges of it, none is a copy
            replica = p.replica[:-1] if s.sharded else p.replica
            first = max(p.start, s.start)
            last = min(p.end, s.end)
            if first >= last or (write and any(replica)):
                continue
            for name, tensor in s.tensors.items():
                flat = tensor.detach().view(-1)[first - s.start : last - s.start]
                for corner, shape, where in element_range_boxes(p.shape, first - p.start, last - p.start):
                    offset = tuple(o + c for o, c in zip(p.offset, corner, strict=True))
                    data = flat[where : where + math.prod(shape)].view(shape)
                    later = None
                    if tensor.is_meta and s.compact is not None:
                        later = functools.partial(s.compact.read, first - s.start + where, shape)
                    yield RankTensorChunk(f"{STATES}{name}.{p.key}", p.whole, offset, data, p.padded, later)


def stateless_boxes(placed: Sequence[tuple[Tensor, list[LocalToGlobalSlice]]]) -> list[StatelessBox]:
    """Assigns each box of frozen weights to one of the ranks that have it: where some experts train, the states of all
    are one tensor with gaps."""
    return [
        (p.key, p.offset, p.shape)
        for local, parts in placed
        for p in parts
        if not local.requires_grad and is_main_replica(p.replica)
    ]


def element_range_boxes(
    shape: tuple[int, ...], first: int, last: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Elements first .. last - 1 of a row-major tensor as boxes: (corner, shape, elements before it). At most 2 x dims
    - 1."""
    if len(shape) == 1:
        yield (first,), (last - first,), 0
        return
    row = math.prod(shape[1:])
    done = first
    while done < last:
        line, within = divmod(done, row)
        if within == 0 and last - done >= row:
            lines = (last - done) // row
            yield (line, *(0 for _ in shape[1:])), (lines, *shape[1:]), done - first
            done += lines * row
        else:
            stop = min(last, (line + 1) * row)
            for corner, inner, where in element_range_boxes(shape[1:], within, within + stop - done):
                yield (line, *corner), (1, *inner), done - first + where
            done = stop
