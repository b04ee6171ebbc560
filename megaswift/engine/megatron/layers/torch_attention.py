"""Attention of the torch layer spec: PyTorch's scaled-dot-product kernels with GQA, windows, packing and context
parallelism.

Owns the core attention module and the per-row facts it needs (`RowPackedSeqParams`), which travel in Megatron's
`packed_seq_params` slot because every layer, also a recomputed one, receives it. Rotary positions are not here (see
rope.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megaswift.engine.megatron.context_parallel import gather_key_value_sequence
from megaswift.engine.megatron.layers.softcap_attention import SoftCappedAttention, SoftcapScores
from megaswift.losses.contract import Batch

Parts = tuple[Tensor, Tensor, Tensor]
BLOCK = 1024
"""Queries of a block under a window, at least."""
LANES = 8
"""Columns added to queries and keys, of which one is used: fused kernels need head sizes that are multiples of 8."""


class RowPackedSeqParams(PackedSeqParams):
    """How the rows of a batch are made of documents and context-parallel slices.

    `qkv_format` is not "thd": queries keep their [s, b, heads, d] shape and rotary angles come by position. `index` and
    `order`: those of `MicrobatchInputs`.
    """

    def __init__(
        self,
        length: int,
        cu_seqlens: Tensor | None = None,
        cp: int = 1,
        rank: int = 0,
        index: Tensor | None = None,
        order: Tensor | None = None,
    ) -> None:
        super().__init__(qkv_format="rows")
        self.length, self.cp, self.rank = length, cp, rank
        self.bounds: list[int] = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
        self.prefixes = [(-1, 0)] * (len(self.bounds) - 1)
        """Of each document, as from `prefixes_of_documents`."""
        self.index, self.order = index, order
        self._masks: dict[tuple[int, int, int, int | None], Tensor | None] = {}

    @classmethod
    def of_batch(
        cls, batch: Batch, cp: int, rank: int, index: Tensor | None, order: Tensor | None
    ) -> RowPackedSeqParams:
        """Of the rows of a batch in host memory."""
        made = cls(batch.input_ids.shape[1], batch.cu_seqlens, cp, rank, index, order)
        if batch.prefixes is not None:
            made.prefixes = prefixes_of_documents(batch.prefixes, batch.positions, made.bounds)
        return made

    def mask(self, shape: tuple[int, int], offset: int, window: int | None, device: torch.device) -> Tensor | None:
        """bool [queries, keys] on the device, True where seen; None: plain causal. A window's is made once for all
        layers; one without a window, of queries x keys under context parallelism, is not kept."""
        if window is None:
            return visibility_mask(shape, offset, window, device)
        key = (*shape, offset, window)
        if key not in self._masks:
            self._masks[key] = visibility_mask(shape, offset, window, device)
        return self._masks[key]

    def parts(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[tuple[Parts, int]]:
        """Of each run of consecutive local queries: these, and all keys and values [b, heads, run, d] of its document
        up to its end, after those of the document's prefix, with the place of the first query among these keys.

        Rows are cut by `split`, whose gradient is put together once. A slice's is as large as the row, for every
        document.
        """
        chunks = (self.rank, 2 * self.cp - 1 - self.rank) if self.cp > 1 else (0,)
        lengths = [end - start for start, end in zip(self.bounds, self.bounds[1:], strict=False)]
        runs = [length // (2 * self.cp) if self.cp > 1 else length for length in lengths]
        queries = iter(query.split([run for run in runs for _ in chunks], dim=2))
        every = list(zip(key.split(lengths, dim=2), value.split(lengths, dim=2), strict=True))
        for run, length, own, (prefix, before) in zip(runs, lengths, every, self.prefixes, strict=True):
            for chunk in chunks:
                q, end = next(queries), (chunk + 1) * run
                if not run:
                    continue
                keys, values = own if end == length else (t[:, :, :end] for t in own)
                if before:
                    first = (t[:, :, :before] for t in every[prefix])
                    keys, values = (torch.cat(both, dim=2) for both in zip(first, (keys, values), strict=True))
                yield (q, keys, values), before + chunk * run


def prefixes_of_documents(prefixes: Tensor, positions: Tensor, bounds: Sequence[int]) -> list[tuple[int, int]]:
    """(number of the document that is its prefix, tokens of it) for each document of a packed row; (-1, 0): none."""
    numbers, row = prefixes.tolist(), positions[0].tolist()
    return [
        (number, row[start] if start < end else 0) if number >= 0 else (-1, 0)
        for number, start, end in zip(numbers, bounds, bounds[1:], strict=False)
    ]


def visibility_mask(shape: tuple[int, int], offset: int, window: int | None, device: torch.device) -> Tensor | None:
    """bool [queries, keys], True where seen; query i is at key position offset + i. None: plain causal. `window`
    counts keys."""
    queries, keys = shape
    if (window is None or window >= keys) and offset == 0 and queries == keys:
        return None
    q_at = torch.arange(offset, offset + queries, device=device)[:, None]
    k_at = torch.arange(keys, device=device)[None]
    mask = k_at <= q_at
    return mask if window is None else mask & (k_at > q_at - window)


def windowed_query_blocks(parts: Parts, offset: int, window: int | None) -> Iterator[tuple[Parts, int]]:
    """Windowed queries in blocks with the keys that any of them sees: all blocks inside a document share one mask of
    block x (block + window), where one for the whole document would have queries x keys."""
    query, key, value = parts
    step = max(window or 0, BLOCK)
    if window is None or key.shape[2] <= 2 * step:
        yield parts, offset
        return
    for first in range(0, query.shape[2], step):
        last = min(first + step, query.shape[2])
        low, high = max(0, offset + first - window + 1), offset + last
        yield (query[:, :, first:last], key[:, :, low:high], value[:, :, low:high]), offset + first - low


class TorchAttention(MegatronModule):
    """Causal self-attention over documents. Takes [s / cp, b, heads, d], gives [s / cp, b, heads x d]."""

    def __init__(
        self, config: Any, layer_number: int, *, softmax_scale: float | None = None, pg_collection: Any = None, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.cp_group = pg_collection.cp
        self.softmax_scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.dropout = config.attention_dropout
        self.window = window_of_layer(config, layer_number)
        self.softcap: float | None = config.features.attention_softcap
        assert self.softcap is None or not self.dropout, "attention dropout is not supported with a soft cap"
        self.softmax_offset: nn.Parameter | None = None
        if config.softmax_type == "learnable":  # Megatron's name for attention sinks
            assert self.softcap is None, "no family has both"
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        packed_seq_params: RowPackedSeqParams | None = None,
        **__: Any,
    ) -> Tensor:
        """Attention of the local queries to every key of their document that stands before them."""
        rows = packed_seq_params if packed_seq_params is not None else RowPackedSeqParams(query.shape[0])
        if rows.index is not None and rows.order is not None:
            both = gather_key_value_sequence(torch.cat([key, value], dim=-1), rows.order, rows.index, self.cp_group)
            key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        repeat = query.shape[2] // key.shape[2]
        if repeat > 1:
            key, value = (t.repeat_interleave(repeat, dim=2) for t in (key, value))
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # [b, h, s, d]
        dropout = self.dropout if self.training else 0.0
        outs = []
        # heads lie on ranks: each draws its own
        with get_cuda_rng_tracker().fork() if dropout else contextlib.nullcontext():
            for run, start in rows.parts(q, k, v):
                if self.softcap is not None:
                    rule = SoftcapScores(self.softmax_scale, self.softcap, start, self.window)
                    outs.append(SoftCappedAttention.apply(*run, rule))
                    continue
                for parts, offset in windowed_query_blocks(run, start, self.window):
                    shape = parts[0].shape[2], parts[1].shape[2]
                    outs.append(self._attend(parts, rows.mask(shape, offset, self.window, q.device), dropout))
        out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
        return out.permute(2, 0, 1, 3).reshape(out.shape[2], out.shape[0], -1)

    def _attend(self, parts: Parts, mask: Tensor | None, dropout: float) -> Tensor:
        """[b, h, run, d] of one run of queries and the keys that it may see."""
        if self.softmax_offset is not None:
            return sink_attention(parts, self.softmax_offset, self.softmax_scale, mask, dropout)
        return F.scaled_dot_product_attention(
            *parts, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale, dropout_p=dropout
        )

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """The sinks, cut by heads."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets)


def window_of_layer(config: Any, layer_number: int) -> int | None:
    """How many keys a query of this layer (counted from 1) sees, itself among them; None: all before it."""
    skip = getattr(config, "window_attn_skip_freq", None)
    if config.window_size is None or not (skip is None or _is_windowed(skip, layer_number)):
        return None
    return config.window_size[0] + 1


def _is_windowed(skip: int | list[int], layer_number: int) -> bool:
    """Megatron's rule: an int n makes every n-th layer a full one, a list says it layer by layer (1: window)."""
    return layer_number % skip != 0 if isinstance(skip, int) else bool(skip[layer_number - 1])


def sink_attention(
    qkv: tuple[Tensor, Tensor, Tensor], sink: Tensor, scale: float, mask: Tensor | None, dropout: float = 0.0
) -> Tensor:
    """Attention with a learned sink in each head's softmax (gpt-oss, arXiv:2508.10925), by PyTorch's fused kernels.

    Probabilities are exp(score) / (sum of exp(score) + exp(sink)): the sink is one more key, whose score is the sink
    for every query and whose value is zero. Returns [b, h, s, d] from q [b, h, s, d], k and v [b, h, n, d], sink [h];
    `mask` bool [s, n], True where a key is visible, None: causal.
    """
    q, k, v = qkv
    b, d = q.shape[0], q.shape[3]
    lanes = q.new_zeros(LANES)
    lanes[0] = 1.0
    q = torch.cat([q, lanes.expand(*q.shape[:-1], LANES)], dim=-1)
    # [h, d + lanes]: times the query's 1 and the scale
    score = F.pad((sink.float() / scale).to(q.dtype)[:, None], (d, LANES - 1))
    k = torch.cat([score[None, :, None].expand(b, -1, -1, -1), F.pad(k, (0, LANES))], dim=2)
    v = F.pad(v, (0, LANES, 1, 0))
    if mask is None:  # a query that sees the sink alone keeps the diagonal in place
        q = F.pad(q, (0, 0, 1, 0))
    else:
        mask = F.pad(mask, (1, 0), value=True)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, dropout_p=dropout
    )
    return out[:, :, int(mask is None) :, :d]
