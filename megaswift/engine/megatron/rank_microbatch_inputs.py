"""The inputs of one micro-batch on a rank: its slice of every sequence, with positions, labels and packing.

Owns the cut of a Batch for context parallelism and the layout objects of packed rows, for both layer specs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megaswift.device_copy import copy_to_device_async
from megaswift.engine.megatron.context_parallel import gather_order, local_row_positions
from megaswift.engine.megatron.layers.torch_attention import RowPackedSeqParams
from megaswift.losses.contract import Batch


@dataclass(frozen=True)
class MicrobatchInputs:
    """Local tensors `[b, s / cp]` of one micro-batch."""

    batch: Batch
    """Whole sequences, for the loss."""
    input_ids: Tensor
    positions: Tensor
    """int64 [b or 1, s / cp]; one row where all rows have the same positions."""
    labels: Tensor
    labeled_rows: Tensor
    """int64 [n]: positions of the flat [s / cp x b] whose label's weight is not 0."""
    padding: Tensor
    """bool: True on padding."""
    rows: PackedSeqParams | None
    index: Tensor | None
    """int64 [s / cp]: which positions these are; None without context parallelism."""
    order: Tensor | None
    """int64 [s]: how joined slices become the sequence; None without context parallelism."""


@dataclass
class TEPackedSeqParams(PackedSeqParams):
    """Megatron-Core's, and what it leaves for Transformer Engine to find out on the device."""

    pad_between_seqs: bool = False


def _thd(cu_seqlens: Tensor | None, cp: int, device: torch.device) -> PackedSeqParams | None:
    """Packed rows as Transformer Engine takes them; None when not packed. `cu_seqlens` is in host memory.

    Context parallelism needs the padded bounds too; they are the others: padding belongs to documents.
    """
    if cu_seqlens is None:
        return None
    longest = int(cu_seqlens.diff().max())
    bounds = copy_to_device_async(cu_seqlens.int(), device)
    padded = bounds if cp > 1 else None
    return TEPackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def microbatch_inputs(batch: Batch, cp: int, rank: int, device: torch.device, attention: str) -> MicrobatchInputs:
    """The slice of `batch` that context-parallel `rank` of `cp` computes. Indices are
    computed on the host, and each tensor is copied to the device once: the host never waits for the device."""
    length = batch.input_ids.shape[1]
    index = order = None
    weights = batch.loss_weights
    if cp > 1:
        local = local_row_positions(length, batch.cu_seqlens, cp, rank)
        weights = weights.index_select(1, local.to(weights.device))
        index, order = (copy_to_device_async(t, device) for t in (local, gather_order(length, batch.cu_seqlens, cp)))
    rows: PackedSeqParams | None
    if attention == "torch":
        rows = RowPackedSeqParams(length, batch.cu_seqlens, cp, rank, index, order)
    else:
        rows = _thd(batch.cu_seqlens, cp, device)
    same_positions = bool((batch.positions == batch.positions[:1]).all())
    whole = batch.to(device)

    def cut(x: Tensor) -> Tensor:
        return x if index is None else x.index_select(1, index)

    return MicrobatchInputs(
        batch=whole,
        input_ids=cut(whole.input_ids),
        positions=cut(whole.positions[:1] if same_positions else whole.positions),
        labels=cut(whole.labels),
        labeled_rows=copy_to_device_async(weights.t().reshape(-1).nonzero().squeeze(1), device),
        padding=~cut(whole.valid),
        rows=rows,
        index=index,
        order=order,
    )
