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
    labeled_rows: Tensor
    """int64 [n]: positions of the flat [s / cp x b] whose label's weight is not 0."""
    padding: Tensor
    """bool: True on padding."""
    rows: PackedSeqParams | None
    index: Tensor
    """int64 [s / cp]: which positions these are."""
    order: Tensor
    """int64 [s]: how joined slices become the sequence."""


def _thd(cu_seqlens: Tensor | None, cp: int, device: torch.device) -> PackedSeqParams | None:
    """Packed rows as Transformer Engine takes them; None when not packed. `cu_seqlens` is in host memory.

    Context parallelism needs the padded bounds too. Without it they are left out: Transformer Engine would compare them
    with the others on the device in every layer, and wait for the answer.
    """
    if cu_seqlens is None:
        return None
    longest = int(cu_seqlens.diff().max())
    bounds = cu_seqlens.to(device, torch.int32)
    padded = bounds if cp > 1 else None
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
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
        layout = _thd(batch.cu_seqlens, cp, device)

    def own(x: Tensor) -> Tensor:
        return x if cp == 1 else x.index_select(1, index)

    def cut(x: Tensor) -> Tensor:
        return own(x).to(device)

    positions = batch.positions
    if positions.shape[0] > 1 and bool((positions == positions[:1]).all()):
        positions = positions[:1]
    return MicrobatchInputs(
        batch=batch.to(device),
        input_ids=cut(batch.input_ids),
        positions=cut(positions),
        labels=cut(batch.labels),
        # in host memory: the device would have to be waited for
        labeled_rows=own(batch.loss_weights).t().reshape(-1).nonzero().squeeze(1).to(device),
        padding=~cut(batch.valid),
        rows=layout,
        index=index.to(device),
        order=order.to(device),
    )
