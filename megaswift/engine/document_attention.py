"""Attention within the documents of rows: PyTorch's scaled-dot-product kernels with shared key heads, windows, soft
caps, sinks, shared prefixes and context-parallel slices.

Owns how rows are cut into runs of queries with the keys that these see, for both engines. Where the tensors come from,
and how a module gets its `RowDocuments`, is each engine's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megaswift.device_copy import copy_to_device_async
from megaswift.engine.softcap_attention import SoftCappedAttention, SoftcapScores
from megaswift.losses.contract import Batch

Parts = tuple[Tensor, Tensor, Tensor]
BLOCK = 1024
"""Queries of a block under a window, at least."""
JOINED = 256
"""Queries of neighbouring short documents that attend together, under a mask, at most: a kernel for each would take
longer to start than to run on a GPU."""
LANES = 8
"""Columns added to queries and keys, of which one is used: fused kernels need head sizes that are multiples of 8."""
GROUPED_HEAD_SIZE = 256
"""Up to which fused kernels share key heads among query heads, without a mask (transformers' `use_gqa_in_sdpa`)."""


@dataclass(frozen=True)
class AttentionRule:
    """How a layer attends."""

    scale: float
    window: int | None = None
    """How many keys a query sees, itself among them; None: all before it."""
    softcap: float | None = None
    sink: Tensor | None = None
    """[heads], of `sink_attention`."""
    dropout: float = 0.0


class RowDocuments:
    """How the rows of a batch are made of documents and, under context parallelism, of slices."""

    def __init__(self, length: int, cu_seqlens: Tensor | None = None, cp: int = 1, rank: int = 0) -> None:
        self.cp, self.rank = cp, rank
        self.bounds: list[int] = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
        self.prefixes = [(-1, 0)] * (len(self.bounds) - 1)
        """Of each document, as from `prefixes_of_documents`."""
        self.joined: list[tuple[int, ...]] = [(end - start,) for start, end in pairwise(self.bounds)]
        """Lengths of the documents that each of these is made of (`join_short`)."""
        self._masks: dict[tuple[Any, ...], Tensor | None] = {}

    @classmethod
    def of_batch(cls, batch: Batch, cp: int = 1, rank: int = 0) -> RowDocuments:
        """Of the rows of a batch in host memory."""
        made = cls(batch.input_ids.shape[1], batch.cu_seqlens, cp, rank)
        if batch.prefixes is not None:
            made.prefixes = prefixes_of_documents(batch.prefixes, batch.positions, made.bounds)
        return made

    def join_short(self, most: int) -> RowDocuments:
        """The same rows with neighbours of at most so many tokens together as one document, where they have the same
        prefix and are none. Not under context parallelism."""
        assert self.cp == 1
        made, used = RowDocuments(self.bounds[-1]), {prefix for prefix, _ in self.prefixes}
        places: dict[int, int] = {-1: -1}
        made.bounds, made.prefixes, made.joined = [0], [], []
        for number, (end, (prefix, before), lengths) in enumerate(
            zip(self.bounds[1:], self.prefixes, self.joined, strict=True)
        ):
            here = (places[prefix], before)
            fits = len(made.bounds) > 1 and end - made.bounds[-2] <= most and made.prefixes[-1] == here
            if fits and not used & {number, number - 1}:
                made.bounds[-1] = end
                made.joined[-1] += lengths
            else:
                made.bounds.append(end)
                made.prefixes.append(here)
                made.joined.append(lengths)
            places[number] = len(made.joined) - 1
        return made

    @property
    def has_prefixes(self) -> bool:
        """Whether any document begins with tokens of another."""
        return any(prefix >= 0 for prefix, _ in self.prefixes)

    def mask(self, shape: tuple[int, int], offset: int, window: int | None, device: torch.device) -> Tensor | None:
        """bool [queries, keys] on the device, True where seen; None: plain causal. A window's is made once for all
        layers; one without a window, of queries x keys under context parallelism, is not kept."""
        if window is None:
            return visibility_mask(shape, offset, window, device)
        key = (*shape, offset, window)
        if key not in self._masks:
            self._masks[key] = visibility_mask(shape, offset, window, device)
        return self._masks[key]

    def prefix_mask(self, queries: int, keys: int, like: Tensor) -> Tensor:
        """Causal, the last query at the last key: on a GPU by a name, which torch's kernels take without a mask in
        memory; elsewhere [queries, keys] to add to scores, in the dtype in which it is kept for the backward pass, once
        for all layers."""
        if like.device.type == "cuda":
            aligned: Tensor = causal_lower_right(queries, keys)
            return aligned
        key = (queries, keys, like.dtype)
        if key not in self._masks:
            hidden = torch.full((queries, keys), -torch.inf, dtype=like.dtype, device=like.device)
            self._masks[key] = hidden.triu_(keys - queries + 1)
        kept = self._masks[key]
        assert kept is not None
        return kept

    def joined_mask(self, lengths: tuple[int, ...], before: int, window: int | None, device: torch.device) -> Tensor:
        """The same of documents of these lengths side by side, after `before` tokens that all of them see."""
        key = (lengths, before, window)
        if key not in self._masks:
            number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
            position = torch.cat([torch.arange(before, before + length) for length in lengths])
            k_at, k_of = torch.cat([torch.arange(before), position]), torch.cat([torch.full((before,), -1), number])
            mask = (k_at <= position[:, None]) & ((k_of == number[:, None]) | (k_of < 0))
            mask = mask if window is None else mask & (k_at > position[:, None] - window)
            self._masks[key] = copy_to_device_async(mask, device)
        made = self._masks[key]
        assert made is not None
        return made

    def parts(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[tuple[Parts, int, tuple[int, ...]]]:
        """Of each run of consecutive local queries: these, and all keys and values [b, heads, run, d] of its document
        up to its end, after those of the document's prefix, with the place of the first query among these keys, and
        what the document is joined of.

        Rows are cut by `split`, whose gradient is put together once. A slice's is as large as the row, for every
        document.
        """
        chunks = (self.rank, 2 * self.cp - 1 - self.rank) if self.cp > 1 else (0,)
        lengths = [end - start for start, end in zip(self.bounds, self.bounds[1:], strict=False)]
        runs = [length // (2 * self.cp) if self.cp > 1 else length for length in lengths]
        queries = iter(query.split([run for run in runs for _ in chunks], dim=2))
        every = list(zip(key.split(lengths, dim=2), value.split(lengths, dim=2), strict=True))
        for run, length, own, (prefix, before), joined in zip(
            runs, lengths, every, self.prefixes, self.joined, strict=True
        ):
            for chunk in chunks:
                q, end = next(queries), (chunk + 1) * run
                if not run:
                    continue
                keys, values = own if end == length else (t[:, :, :end] for t in own)
                if before:
                    first = (t[:, :, :before] for t in every[prefix])
                    keys, values = (torch.cat(both, dim=2) for both in zip(first, (keys, values), strict=True))
                yield (q, keys, values), before + chunk * run, joined


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


def attend_documents(query: Tensor, key: Tensor, value: Tensor, documents: RowDocuments, rule: AttentionRule) -> Tensor:
    """[b, heads, local s, d] of queries [b, heads, local s, d], and keys and values [b, key heads, s, d] of the whole
    rows."""
    assert rule.softcap is None or (not rule.dropout and rule.sink is None), "a soft cap goes with neither"
    outs = []
    for run, start, joined in documents.parts(query, key, value):
        if len(joined) > 1:
            assert rule.softcap is None, "a soft cap goes with no mask"
            outs.append(_attend(run, documents.joined_mask(joined, start, rule.window, query.device), rule))
            continue
        if rule.softcap is not None:
            scores = SoftcapScores(rule.scale, rule.softcap, start, rule.window)
            outs.append(SoftCappedAttention.apply(*with_key_heads_repeated(run), scores))
            continue
        if start and documents.cp == 1 and rule.window is None and rule.sink is None:
            outs.append(_attend(run, documents.prefix_mask(run[0].shape[2], run[1].shape[2], query), rule))
            continue
        for parts, offset in windowed_query_blocks(run, start, rule.window):
            shape = parts[0].shape[2], parts[1].shape[2]
            outs.append(_attend(parts, documents.mask(shape, offset, rule.window, query.device), rule))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def _attend(parts: Parts, mask: Tensor | None, rule: AttentionRule) -> Tensor:
    """[b, heads, run, d] of one run of queries and the keys that it may see."""
    if rule.sink is not None:
        return sink_attention(with_key_heads_repeated(parts), rule.sink, rule.scale, mask, rule.dropout)
    query, key, value = parts
    grouped = query.shape[1] != key.shape[1]
    if grouped and (mask is not None or not key.shape[-1] == value.shape[-1] <= GROUPED_HEAD_SIZE):
        parts, grouped = with_key_heads_repeated(parts), False
    return F.scaled_dot_product_attention(
        *parts,
        attn_mask=mask,
        is_causal=mask is None,
        scale=rule.scale,
        dropout_p=rule.dropout,
        enable_gqa=grouped,
    )


def with_key_heads_repeated(parts: Parts) -> Parts:
    """Keys and values [b, key heads, n, d] repeated to the heads of the queries."""
    query, key, value = parts
    repeat = query.shape[1] // key.shape[1]
    if repeat == 1:
        return parts
    return query, key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)


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
