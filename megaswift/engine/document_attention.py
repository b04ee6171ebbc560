"""Attention within the documents of rows: PyTorch's scaled-dot-product kernels with shared key heads, windows, soft
caps, sinks, shared prefixes and context-parallel slices.

Owns how rows are cut into runs of queries with the keys that these see, for both engines. Where the tensors come from,
and how a module gets its `RowDocuments`, is each engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megaswift.device_copy import copy_to_device_async
from megaswift.engine.gated_delta import TokenDocuments
from megaswift.losses.contract import Batch

Parts = tuple[Tensor, Tensor, Tensor]
BLOCK = 1024
"""Queries of a block under a window: a kernel computes block x (block + window) scores, most of them to some use."""
JOINED = 256
"""Queries of neighbouring short documents that attend together, under a mask, at most: a kernel for each would take
longer to start than to run on a GPU."""
ALIGNED = 8
"""Elements between rows of a mask: kernels on a GPU copy one with rows at other distances."""
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

    @property
    def sinks(self) -> int:
        """Columns of a mask before those of the keys."""
        return int(self.sink is not None)


class RowDocuments:
    """How the rows of a batch are made of documents and, under context parallelism, of slices."""

    def __init__(self, length: int, cu_seqlens: Tensor | None = None, cp: int = 1, rank: int = 0) -> None:
        self.cp = cp
        self.rank = rank
        self.bounds: list[int] = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
        self.prefixes = [(-1, 0)] * (len(self.bounds) - 1)
        """The prefix of each document, as from `prefixes_of_documents`."""
        self.joined: list[tuple[int, ...]] = [(end - start,) for start, end in pairwise(self.bounds)]
        """Lengths of the documents that each of these is made of (`join_short`)."""
        self._masks: dict[tuple[Any, ...], Tensor] = {}
        self._tokens: TokenDocuments | None = None

    @classmethod
    def of_batch(cls, batch: Batch, cp: int = 1, rank: int = 0) -> RowDocuments:
        """Returns the documents of the rows of a batch in host memory."""
        made = cls(batch.input_ids.shape[1], batch.cu_seqlens, cp, rank)
        if batch.prefixes is not None:
            made.prefixes = prefixes_of_documents(batch.prefixes, batch.positions, made.bounds)
        return made

    def join_short(self, most: int) -> RowDocuments:
        """Join neighbouring documents of at most so many tokens, where they have the same prefix and are none
        themselves.

        Not under context parallelism.
        """
        assert self.cp == 1
        made = RowDocuments(self.bounds[-1])
        used = {prefix for prefix, _ in self.prefixes}
        places: dict[int, int] = {-1: -1}
        made.bounds = [0]
        made.prefixes = []
        made.joined = []
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

    def of_tokens(self, device: torch.device) -> TokenDocuments | None:
        """Return the document of each token, made once for all layers; None where rows are not packed."""
        if len(self.bounds) > 2 and self._tokens is None:
            assert not self.has_prefixes, "a prefix's state is not shared"
            self._tokens = TokenDocuments.of_bounds(self.bounds, device)
        return self._tokens

    @property
    def has_prefixes(self) -> bool:
        """Whether any document begins with tokens of another."""
        return any(prefix >= 0 for prefix, _ in self.prefixes)

    def mask(self, queries: int, keys: int, rule: AttentionRule, like: Tensor) -> Tensor | None:
        """Return the mask of queries, the last of which is at the last key.

        None for plain causal; where the keys begin earlier, a name on a GPU, which torch's kernels take without a mask
        in memory; else [queries, sinks + keys] to add to scores.
        """
        if rule.window is None or rule.window >= keys:
            if queries == keys:
                return None
            if like.device.type == "cuda":  # a sink is one more key before those that all queries see
                aligned: Tensor = causal_lower_right(queries, rule.sinks + keys)
                return aligned
        return self._kept((queries, keys), rule, like, lambda: visible_keys(queries, keys, rule.window, like.device))

    def joined_mask(self, lengths: tuple[int, ...], before: int, rule: AttentionRule, like: Tensor) -> Tensor:
        """Return the mask [queries, sinks + keys] of documents of these lengths side by side, after `before` tokens
        that all see."""

        def visible() -> Tensor:
            number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
            position = torch.cat([torch.arange(before, before + length) for length in lengths])
            k_at = torch.cat([torch.arange(before), position])
            k_of = torch.cat([torch.full((before,), -1), number])
            seen = (k_at <= position[:, None]) & ((k_of == number[:, None]) | (k_of < 0))
            seen = seen if rule.window is None else seen & (k_at > position[:, None] - rule.window)
            return copy_to_device_async(seen, like.device)

        return self._kept((lengths, before), rule, like, visible)

    def _kept(self, key: tuple[Any, ...], rule: AttentionRule, like: Tensor, visible: Callable[[], Tensor]) -> Tensor:
        """A mask, made once for all layers."""
        key = (*key, rule.window, rule.sinks, like.dtype)
        if key not in self._masks:
            self._masks[key] = additive_mask(visible(), rule.sinks, like.dtype)
        return self._masks[key]

    def parts(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[tuple[Parts, int, tuple[int, ...]]]:
        """Yields for each run of consecutive local queries: these, and all keys and values [b, heads, run, d] of its
        document up to its end, after those of the document's prefix, with the place of the first query among these
        keys, and what the document is joined of.

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
                q = next(queries)
                end = (chunk + 1) * run
                if not run:
                    continue
                keys, values = own if end == length else (t[:, :, :end] for t in own)
                if before:
                    first = (t[:, :, :before] for t in every[prefix])
                    keys, values = (torch.cat(both, dim=2) for both in zip(first, (keys, values), strict=True))
                yield (q, keys, values), before + chunk * run, joined


def prefixes_of_documents(prefixes: Tensor, positions: Tensor, bounds: Sequence[int]) -> list[tuple[int, int]]:
    """Return for each document of a packed row the number of the document that is its prefix, and the tokens of it.

    (-1, 0) for a document without a prefix.
    """
    numbers = prefixes.tolist()
    row = positions[0].tolist()
    found = []
    for number, start, end in zip(numbers, bounds, bounds[1:], strict=False):
        if number < 0:
            found.append((-1, 0))
        else:
            found.append((number, row[start] if start < end else 0))
    return found


def visible_keys(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return bool [queries, keys], True where a query sees a key; the last query is at the last key."""
    q_at = torch.arange(keys - queries, keys, device=device)[:, None]
    k_at = torch.arange(keys, device=device)[None]
    seen = k_at <= q_at
    return seen if window is None else seen & (k_at > q_at - window)


def additive_mask(visible: Tensor, sinks: int, dtype: torch.dtype) -> Tensor:
    """Return [queries, sinks + keys]: 0 for sinks and where bool [queries, keys] is True, else -inf.

    In the queries' dtype and with aligned rows, so that torch's kernels keep this one for the backward pass of all
    layers, and no copies.
    """
    queries = visible.shape[0]
    width = sinks + visible.shape[1]
    rows = torch.zeros(queries, width + -width % ALIGNED, dtype=dtype, device=visible.device)[:, :width]
    rows[:, sinks:].masked_fill_(~visible, -torch.inf)
    return rows


def windowed_query_blocks(parts: Parts, window: int | None) -> Iterator[Parts]:
    """Cut windowed queries into blocks, each with the keys that any of its queries sees.

    All blocks inside a document share one mask of block x (block + window), where one for the whole document would have
    queries x keys.
    """
    if window is None:
        yield parts
        return
    query, key, value = parts
    before = key.shape[2] - query.shape[2]
    for first in range(0, query.shape[2], BLOCK):
        last = min(first + BLOCK, query.shape[2])
        low = max(0, before + first - window + 1)
        high = before + last
        yield query[:, :, first:last], key[:, :, low:high], value[:, :, low:high]


def attend_documents(query: Tensor, key: Tensor, value: Tensor, documents: RowDocuments, rule: AttentionRule) -> Tensor:
    """Let each document of a row attend to itself and to its prefix.

    Queries are [b, heads, local s, d]; keys and values are [b, key heads, s, d] of the whole rows. Returns
    [b, heads, local s, d].
    """
    assert rule.softcap is None or (not rule.dropout and rule.sink is None), "a soft cap goes with neither"
    outs = []
    for run, start, joined in documents.parts(query, key, value):
        if len(joined) > 1:
            assert rule.softcap is None, "a soft cap goes with no mask"
            outs.append(_attend(run, documents.joined_mask(joined, start, rule, query), rule))
            continue
        if rule.softcap is not None:
            scores = SoftcapScores(rule.scale, rule.softcap, start, rule.window)
            outs.append(SoftCappedAttention.apply(*with_key_heads_repeated(run), scores))
            continue
        for parts in windowed_query_blocks(run, rule.window):
            mask = documents.mask(parts[0].shape[2], parts[1].shape[2], rule, query)
            outs.append(_attend(parts, mask, rule))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def _attend(parts: Parts, mask: Tensor | None, rule: AttentionRule) -> Tensor:
    """[b, heads, run, d] of one run of queries and the keys that it may see."""
    if rule.sink is not None:
        return sink_attention(with_key_heads_repeated(parts), rule.sink, rule.scale, mask, rule.dropout)
    query, key, value = parts
    grouped = query.shape[1] != key.shape[1]
    if grouped and (mask is not None or not key.shape[-1] == value.shape[-1] <= GROUPED_HEAD_SIZE):
        parts = with_key_heads_repeated(parts)
        grouped = False
    return F.scaled_dot_product_attention(
        *parts,
        attn_mask=mask,
        is_causal=mask is None,
        scale=rule.scale,
        dropout_p=rule.dropout,
        enable_gqa=grouped,
    )


def with_key_heads_repeated(parts: Parts) -> Parts:
    """Repeat keys and values [b, key heads, n, d] so that each query head has its own."""
    query, key, value = parts
    repeat = query.shape[1] // key.shape[1]
    if repeat == 1:
        return parts
    return query, key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)


def sink_attention(
    qkv: tuple[Tensor, Tensor, Tensor], sink: Tensor, scale: float, mask: Tensor | None, dropout: float = 0.0
) -> Tensor:
    """Attend with a learned sink in each head's softmax (gpt-oss, arXiv:2508.10925), by PyTorch's fused kernels.

    Probabilities are exp(score) / (sum of exp(score) + exp(sink)): the sink is one more key, whose score is the sink
    for every query and whose value is zero. Returns [b, h, s, d] from q [b, h, s, d], k and v [b, h, n, d], sink [h];
    `mask` [s, 1 + n] of the sink, which every query sees, and the keys; None: causal.
    """
    q, k, v = qkv
    b = q.shape[0]
    d = q.shape[3]
    lanes = q.new_zeros(LANES)
    lanes[0] = 1.0
    q = torch.cat([q, lanes.expand(*q.shape[:-1], LANES)], dim=-1)
    # [h, d + lanes]: times the query's 1 and the scale
    score = F.pad((sink.float() / scale).to(q.dtype)[:, None], (d, LANES - 1))
    k = torch.cat([score[None, :, None].expand(b, -1, -1, -1), F.pad(k, (0, LANES))], dim=2)
    v = F.pad(v, (0, LANES, 1, 0))
    if mask is None:  # a query that sees the sink alone keeps the diagonal in place
        q = F.pad(q, (0, 0, 1, 0))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, dropout_p=dropout
    )
    return out[:, :, int(mask is None) :, :d]


# Attention whose scores pass a soft cap, cap x tanh(score / cap), before the softmax (Gemma 2, arXiv:2408.00118,
# section 2.2).
#
# Owns the product for one run of queries. PyTorch's fused kernel has no cap, so this is written out: queries go in
# chunks, each over the keys that its window leaves, and the backward pass computes a chunk's scores again. Nothing of
# size queries x keys is kept.

CHUNK_BYTES = 1 << 26
"""Float32 scores of one chunk of queries, at most."""


@dataclass(frozen=True)
class SoftcapScores:
    """How scores are made of queries and keys."""

    scale: float
    cap: float
    offset: int
    """Query i stands at key position offset + i."""
    window: int | None
    """How many keys a query sees, itself among them; None: all before it."""

    def chunks(self, query: Tensor, keys: int) -> Iterator[tuple[slice, slice]]:
        """Yield chunks of queries, each with the keys that any of them sees."""
        b, h, queries, _ = query.shape
        rows = max(1, CHUNK_BYTES // (4 * b * h * keys))
        for first in range(0, queries, rows):
            last = min(first + rows, queries)
            low = 0 if self.window is None else max(0, self.offset + first - self.window + 1)
            yield slice(first, last), slice(low, min(keys, self.offset + last))

    def probabilities(self, query: Tensor, key: Tensor, rows: slice, seen: slice) -> tuple[Tensor, Tensor]:
        """Return the probabilities and the tanh of scores / cap, float32 [b, h, rows, seen] each."""
        capped = torch.tanh((query[:, :, rows] @ key[:, :, seen].transpose(-1, -2)).float() * (self.scale / self.cap))
        positions = torch.arange(rows.start, rows.stop, device=query.device)[:, None] + self.offset
        keys = torch.arange(seen.start, seen.stop, device=query.device)[None]
        hidden = keys > positions
        if self.window is not None:
            hidden |= keys <= positions - self.window
        return (capped * self.cap).masked_fill(hidden, float("-inf")).softmax(dim=-1), capped


class SoftCappedAttention(torch.autograd.Function):
    """query [b, h, q, d], key and value [b, h, k, d] to [b, h, q, d]; every query sees at least itself."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scores: SoftcapScores) -> Tensor:
        """Keeps its inputs only."""
        ctx.save_for_backward(query, key, value)
        ctx.scores = scores
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        for rows, seen in scores.chunks(query, key.shape[2]):
            probs, _ = scores.probabilities(query, key, rows, seen)
            out[:, :, rows] = probs.to(value.dtype) @ value[:, :, seen]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Compute each chunk's probabilities again, and differentiate softmax, cap and products.

        Sums over chunks are in float32.
        """
        query, key, value = ctx.saved_tensors
        scores: SoftcapScores = ctx.scores
        d_query = torch.empty_like(query)
        d_key, d_value = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (key, value))
        for rows, seen in scores.chunks(query, key.shape[2]):
            probs, capped = scores.probabilities(query, key, rows, seen)
            part = grad[:, :, rows]
            d_value[:, :, seen] += probs.to(part.dtype).transpose(-1, -2) @ part
            d_probs = (part @ value[:, :, seen].transpose(-1, -2)).float()
            d_probs -= (d_probs * probs).sum(dim=-1, keepdim=True)
            d_scores = (d_probs.mul_(probs) * (1 - capped.square()) * scores.scale).to(query.dtype)
            d_query[:, :, rows] = d_scores @ key[:, :, seen]
            d_key[:, :, seen] += d_scores.transpose(-1, -2) @ query[:, :, rows]
        return d_query, d_key.to(key.dtype), d_value.to(value.dtype), None
