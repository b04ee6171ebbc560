"""The inputs of one micro-batch on a rank: its slice of every sequence, with positions, labels and packing.

Owns the cut of a Batch for context parallelism and the layout objects of packed rows, for both layer specs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megaswift.engine.megatron.context_parallel import gather_order, local_index
from megaswift.engine.megatron.layers.attention import RowLayout
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
    labeled: Tensor
    """bool: whether the label's weight is not 0."""
    padding: Tensor
    """bool: True on padding."""
    rows: PackedSeqParams | None
    index: Tensor
    """int64 [s / cp]: which positions these are."""
    order: Tensor
    """int64 [s]: how joined slices become the sequence."""


def _thd(batch: Batch) -> PackedSeqParams | None:
    """Packed rows as Transformer Engine wants them; None when not packed."""
    if batch.cu_seqlens is None:
        return None
    bounds = batch.cu_seqlens.to(torch.int32)
    longest = int((bounds[1:] - bounds[:-1]).max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def microbatch_inputs(batch: Batch, cp: int, rank: int, device: torch.device, attention: str) -> MicrobatchInputs:
    """The slice of `batch` that context-parallel `rank` of `cp` computes."""
    length = batch.input_ids.shape[1]
    if attention == "torch":
        rows = RowLayout(length, batch.cu_seqlens, cp, rank)
        index, order = rows.index, rows.order
        rows.index, rows.order = index.to(device), order.to(device)
        layout: PackedSeqParams | None = rows
    else:
        index = local_index(length, batch.cu_seqlens, cp, rank)
        order = gather_order(length, batch.cu_seqlens, cp)
        layout = _thd(batch.to(device))

    def cut(x: Tensor) -> Tensor:
        return (x if cp == 1 else x.index_select(1, index)).to(device)

    positions = batch.positions
    if positions.shape[0] > 1 and bool((positions == positions[:1]).all()):
        positions = positions[:1]
    return MicrobatchInputs(
        batch=batch.to(device),
        input_ids=cut(batch.input_ids),
        positions=cut(positions),
        labels=cut(batch.labels),
        labeled=cut(batch.loss_weights) != 0,
        padding=~cut(batch.valid),
        rows=layout,
        index=index.to(device),
        order=order.to(device),
    )
