"""The inputs of one micro-batch on a rank: its slice of every sequence, with positions, labels and packing.

Owns the cut of a Batch for context parallelism and the layout objects of packed rows, for both layer specs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megaswift.device_copy import copy_to_device_async, pin_where_copied
from megaswift.engine.divergence import TeacherOutputs, without_teacher
from megaswift.engine.document_attention import RowDocuments, prefixes_of_documents
from megaswift.engine.megatron.context_parallel import gather_order, local_row_positions
from megaswift.engine.megatron.layers.attention.document import RowPackedSeqParams
from megaswift.losses.contract import Batch
from megaswift.losses.mtp import tokens_ahead


@dataclass(frozen=True)
class InputsAhead:
    """What one layer for multi-token prediction reads and predicts, local tensors [b, s / cp]."""

    input_ids: Tensor
    labels: Tensor
    labeled_rows: Tensor
    """int64 [n], as in `MicrobatchInputs`."""
    padding: Tensor
    """bool: True on padding, and where the token lies in another document."""


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
    ahead: tuple[InputsAhead, ...] = ()
    """For each layer for multi-token prediction that is asked for."""
    teacher: TeacherOutputs | None = None
    """The teacher's outputs at the `labeled_rows`, [n, ...] each."""


@dataclass(frozen=True)
class PrefixedAttention:
    """How the documents of a packed row attend where some have shared prefixes: each to its prefix, then to itself."""

    query_bounds: Tensor
    """int32 [documents + 1]: where each document's queries begin, and the end."""
    key_bounds: Tensor
    """The same of keys and values once they are taken by `index`."""
    index: Tensor
    """int64 [keys]: which of the row's tokens these are."""
    longest: tuple[int, int]
    """Queries, and keys, of the document that has most."""

    @classmethod
    def of(cls, batch: Batch) -> PrefixedAttention | None:
        """Computes the indices of a batch in host memory; None where no document has a prefix."""
        if batch.prefixes is None or batch.cu_seqlens is None:
            return None
        edges = batch.cu_seqlens.tolist()
        pieces = []
        sizes = []
        for document, (prefix, length) in enumerate(prefixes_of_documents(batch.prefixes, batch.positions, edges)):
            first = edges[prefix]
            start = edges[document]
            end = edges[document + 1]
            pieces += [torch.arange(first, first + length), torch.arange(start, end)]
            sizes.append(length + end - start)
        bounds = torch.tensor([0, *sizes]).cumsum(0).int()
        longest = int(batch.cu_seqlens.diff().max()), max(sizes)
        return cls(batch.cu_seqlens.int(), bounds, torch.cat(pieces), longest)

    def with_tensors(self, function: Callable[[Tensor], Tensor]) -> PrefixedAttention:
        """With what `function` makes of the tensors."""
        return replace(
            self,
            query_bounds=function(self.query_bounds),
            key_bounds=function(self.key_bounds),
            index=function(self.index),
        )


@dataclass
class TEPackedSeqParams(PackedSeqParams):
    """Megatron-Core's, what it leaves for Transformer Engine to find out on the device, and what layers without
    attention read."""

    pad_between_seqs: bool = False
    prefixed: PrefixedAttention | None = None
    """Where documents have shared prefixes. The other bounds are then those of the whole row, whose rotary angles come
    token by token."""
    documents: RowDocuments | None = None
    """Of the whole row, as `RowPackedSeqParams` has them."""
    order: Tensor | None = None
    """That of `MicrobatchInputs`."""


@dataclass(frozen=True)
class MicrobatchHostIndices:
    """What the host computes of a micro-batch, for context-parallel `rank` of `cp`; tensors in host memory."""

    of: tuple[Tensor | None, ...]
    """The tensors that this was computed from."""
    cp: int
    rank: int
    labeled_rows: Tensor
    labeled_ahead: tuple[Tensor, ...]
    """The labeled rows of each layer for multi-token prediction."""
    index: Tensor | None
    order: Tensor | None
    longest: int
    """Tokens of the longest document of a packed row."""
    prefixed: PrefixedAttention | None
    same_positions: bool

    @classmethod
    def compute(cls, batch: Batch, cp: int, rank: int, ahead: int = 0) -> MicrobatchHostIndices:
        """Computes the indices of a batch in host memory, with those of `ahead` layers for multi-token prediction."""
        index = order = None
        weights = [batch.loss_weights, *(tokens_ahead(batch, layer).loss_weights for layer in range(ahead))]
        if cp > 1:
            length = batch.input_ids.shape[1]
            index = local_row_positions(length, batch.cu_seqlens, cp, rank)
            order = gather_order(length, batch.cu_seqlens, cp)
            weights = [w.index_select(1, index.to(w.device)) for w in weights]
        labeled_rows, *labeled_ahead = (w.t().reshape(-1).nonzero().squeeze(1) for w in weights)
        return cls(
            of=_sources(batch),
            cp=cp,
            rank=rank,
            labeled_rows=labeled_rows,
            labeled_ahead=tuple(labeled_ahead),
            index=index,
            order=order,
            longest=0 if batch.cu_seqlens is None else int(batch.cu_seqlens.diff().max()),
            prefixed=PrefixedAttention.of(batch),
            same_positions=bool((batch.positions == batch.positions[:1]).all()),
        )

    def fits(self, batch: Batch, cp: int, rank: int, ahead: int = 0) -> bool:
        """Whether this is of `batch`, whose tensors may have been exchanged since."""
        same = all(a is b for a, b in zip(self.of, _sources(batch), strict=True))
        return same and (self.cp, self.rank) == (cp, rank) and len(self.labeled_ahead) >= ahead


def _sources(batch: Batch) -> tuple[Tensor | None, ...]:
    return batch.input_ids, batch.loss_weights, batch.positions, batch.cu_seqlens, batch.prefixes


def prepare_batch_ahead(batch: Batch, cp: int, rank: int, device: torch.device, ahead: int = 0) -> Batch:
    """The batch in memory that a GPU copies from while the host goes on, with its `MicrobatchHostIndices`."""
    pinned = batch.with_tensors(lambda tensor: pin_where_copied(tensor, device))
    computed = MicrobatchHostIndices.compute(pinned, cp, rank, ahead)
    copied = {name: getattr(computed, name) for name in ("labeled_rows", "index", "order")}
    copied = {name: pin_where_copied(t, device) for name, t in copied.items() if t is not None}
    labeled_ahead = tuple(pin_where_copied(rows, device) for rows in computed.labeled_ahead)
    prefixed = computed.prefixed
    if prefixed is not None:
        prefixed = prefixed.with_tensors(lambda tensor: pin_where_copied(tensor, device))
    return replace(pinned, ahead=replace(computed, **copied, labeled_ahead=labeled_ahead, prefixed=prefixed))


def _thd(
    host: MicrobatchHostIndices, cp: int, cu_seqlens: Tensor | None, documents: RowDocuments, order: Tensor | None
) -> PackedSeqParams | None:
    """Packed rows as Transformer Engine takes them; None when not packed. `cu_seqlens` and `order` are on the device.

    Context parallelism needs the padded bounds too; they are the others: padding belongs to documents.
    """
    if cu_seqlens is None:
        return None
    assert host.prefixed is None or cp == 1, "run.checks.prefix_sharing says so"
    bounds = cu_seqlens.int()
    longest = host.longest
    prefixed = host.prefixed
    if prefixed is not None:
        bounds = bounds[:: len(bounds) - 1].contiguous()
        longest = prefixed.longest[1]  # of the row
        prefixed = prefixed.with_tensors(lambda tensor: copy_to_device_async(tensor, bounds.device))
    padded = bounds if cp > 1 else None
    return TEPackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        prefixed=prefixed,
        documents=documents,
        order=order,
    )


def microbatch_inputs(
    batch: Batch,
    cp: int,
    rank: int,
    device: torch.device,
    attention: str,
    ahead: int = 0,
    reads_teacher: bool = False,
) -> MicrobatchInputs:
    """The slice of `batch` that context-parallel `rank` of `cp` computes. Indices are computed on the host, where a
    loader thread has not done so, and each tensor is copied to the device once: the host never waits for the device.

    With `reads_teacher` its outputs are copied at labeled positions; the batch for the loss is then without them.
    """
    host = batch.ahead
    if not (isinstance(host, MicrobatchHostIndices) and host.fits(batch, cp, rank, ahead)):
        host = MicrobatchHostIndices.compute(batch, cp, rank, ahead)
    index, order = (None if t is None else copy_to_device_async(t, device) for t in (host.index, host.order))

    def on_device(tensor: Tensor) -> Tensor:
        return copy_to_device_async(tensor, device)

    teacher = _labeled_teacher_rows(batch, host).with_tensors(on_device) if reads_teacher else None
    whole = (without_teacher(batch) if reads_teacher else batch).to(device)
    rows: PackedSeqParams | None
    documents = RowDocuments.of_batch(batch, cp, rank)
    if attention == "torch":
        rows = RowPackedSeqParams(documents, index, order)
    else:
        rows = _thd(host, cp, whole.cu_seqlens, documents, order)

    def cut(x: Tensor) -> Tensor:
        return x if index is None else x.index_select(1, index)

    def layer_ahead(layer: int) -> InputsAhead:
        read = tokens_ahead(whole, layer)
        rows = copy_to_device_async(host.labeled_ahead[layer], device)
        return InputsAhead(cut(read.input_ids), cut(read.labels), rows, ~cut(read.inside))

    return MicrobatchInputs(
        batch=whole,
        input_ids=cut(whole.input_ids),
        positions=cut(whole.positions[:1] if host.same_positions else whole.positions),
        labels=cut(whole.labels),
        labeled_rows=copy_to_device_async(host.labeled_rows, device),
        padding=~cut(whole.valid),
        rows=rows,
        index=index,
        order=order,
        ahead=tuple(map(layer_ahead, range(ahead))),
        teacher=teacher,
    )


def _labeled_teacher_rows(batch: Batch, host: MicrobatchHostIndices) -> TeacherOutputs:
    """The teacher's outputs at the labeled rows, where the batch has them."""
    b, s = batch.input_ids.shape
    positions = host.labeled_rows // b
    if host.index is not None:
        positions = host.index[positions]
    flat = host.labeled_rows % b * s + positions
    outputs = TeacherOutputs.of_fields(batch.fields)
    return outputs.with_tensors(lambda t: t.flatten(0, 1).index_select(0, copy_to_device_async(flat, t.device)))
