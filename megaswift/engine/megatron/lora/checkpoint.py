"""The part of a LoRA checkpoint that a rank has: adapters and fully trained modules, never the base model.

Names and places are those of the Hugging Face tensors, so nothing in them depends on a layout:
`adapter.<module>.lora_A.weight` [r, in], `adapter.<module>.lora_B.weight` [out, r], with DoRA
`adapter.<module>.lora_magnitude_vector` [out], `saved.<name>`. Each of the experts that share a parameter has its own,
B with gates before ups.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from megaswift.bridge.adapters.plan import ADAPTER, SAVED, tp_dim_of_adapter_half
from megaswift.bridge.plan import PlanEntry
from megaswift.engine.megatron.checkpoint.rank_chunks import LocalToGlobalSlice
from megaswift.engine.megatron.lora.adapters import RankAdapters
from megaswift.engine.megatron.parallel_context import ParallelContext
from megaswift.models.weights.rules import TensorParallelShard, shard_dim


def trainable_tensor_slices(lora: RankAdapters) -> list[tuple[Tensor, list[LocalToGlobalSlice]]]:
    """Every trainable tensor of this rank with its pieces: those of all experts' adapters where they share one."""
    context = lora.weights.context
    slices: dict[int, tuple[Tensor, list[LocalToGlobalSlice]]] = {}
    for p in lora.placed:
        adapter = p.adapter
        half = p.half
        parameter = p.parameter
        replica = _replica(adapter.entry, adapter.sharded(half), context)
        ranges = adapter.ranges(half, p.owner.ranks, p.owner.rank)
        key = ADAPTER + adapter.name(half)
        dim = tp_dim_of_adapter_half(half)
        first = int(p.tensor.storage_offset() - parameter.storage_offset())
        _, parts = slices.setdefault(id(parameter), (parameter, []))
        parts += _pieces(key, adapter.shape(half), dim, ranges, replica, first)
    for placed in lora.saved:
        entry = placed.entry
        ranks, rank = lora.weights.tp_of(entry)
        replica = _replica(entry, entry.shard != "replicated", context)
        start = 0
        dim = shard_dim(entry.rule)
        parts = []
        for piece in entry.pieces(TensorParallelShard(ranks, rank, lora.weights.padded)):
            whole = entry.hf_shapes[piece.source]
            # rows of the vocabulary's padding are no one's
            ranges = [(min(piece.start, whole[dim]), min(piece.stop, whole[dim]))]
            parts += _pieces(SAVED + entry.hf[piece.source], whole, dim, ranges, replica, start)
            start += piece.length * (placed.tensor.numel() // placed.tensor.shape[dim])
        slices[id(placed.tensor)] = (placed.tensor, parts)
    return list(slices.values())


def _pieces(
    key: str, whole: tuple[int, ...], dim: int, ranges: list[tuple[int, int]], replica: tuple[int, ...], first: int = 0
) -> Iterator[LocalToGlobalSlice]:
    """A local tensor's runs: whole rows, or the one range of columns that it is made of."""
    assert dim == 0 or len(ranges) == 1, f"{key}: several ranges of columns"
    for start, stop in ranges:
        shape = (*whole[:dim], stop - start, *whole[dim + 1 :])
        offset = (0,) * dim + (start,) + (0,) * (len(whole) - dim - 1)
        if stop > start:
            piece = LocalToGlobalSlice(key, first, shape, whole, offset, replica, False)
            yield piece
            first = piece.end


def _replica(entry: PlanEntry, sharded: bool, context: ParallelContext) -> tuple[int, int, int]:
    """(pipeline, tensor, data) number of this rank's copy."""
    coords = context.coordinates
    groups = context.groups
    if entry.expert is not None:
        return 0, 0 if sharded else coords.etp, groups.expt_dp.rank()
    return 0, 0 if sharded else coords.tp, groups.dp_cp.rank()
