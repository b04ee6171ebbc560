"""Gated delta nets (arXiv:2412.06464): linear attention that corrects a state instead of adding to it, within the
documents of packed rows.

Owns the arithmetic of a layer between its two projections: a short causal convolution, the chunked gated delta rule and
a gated norm. A rank that has some of the heads, or a whole row instead of its slice, calls the same functions.

Letters in formulas: b rows of s tokens; g key heads, each with r value heads of its own; dk and dv widths of a key and
of a value; n chunks of c tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaswift.device_copy import copy_to_device_async

CHUNK = 64
"""Tokens of a chunk: inside it everything is a product of matrices, between chunks a state is handed on."""
NORM_EPSILON = 1e-6
"""Added to the squared length of a query or key as flash-linear-attention does."""


@dataclass(frozen=True)
class TokenDocuments:
    """The document of each token of a packed row; all rows of a batch are cut alike."""

    numbers: Tensor
    """int64 [s], rising from 0."""
    count: int
    """Documents in all, empty ones included."""
    bounds: Tensor
    """int64 on the host: where each document begins that has a token, and the end of the row."""

    @classmethod
    def of_bounds(cls, bounds: Sequence[int], device: torch.device) -> TokenDocuments:
        """Number the tokens of a row without waiting for the device.

        Args:
            bounds: [documents + 1] on the host: where each document begins, and the end of the row.
            device: Where the numbers are needed.
        """
        lengths = torch.tensor([end - start for start, end in pairwise(bounds)])
        numbers = torch.arange(len(lengths)).repeat_interleave(lengths)
        return cls(copy_to_device_async(numbers, device), len(lengths), torch.tensor(sorted(set(bounds))))


@dataclass(frozen=True)
class GatedDeltaWeights:
    """The parameters of some key heads of a layer that are not its projections."""

    convolution: Tensor
    """[g x (2 dk + r dv), taps]: for each key head its channels of queries, keys and values."""
    log_decay: Tensor
    """[g x r]: the logarithm of each value head's rate of decay (A_log in Hugging Face's files)."""
    step_bias: Tensor
    """[g x r]: added to a token's step before it multiplies the rate (dt_bias)."""
    norm: Tensor
    """[dv], shared by all heads; not zero-centered, whatever the model's other norms are."""
    norm_epsilon: float
    key_width: int
    """dk."""

    @property
    def group_widths(self) -> tuple[int, int, int, int]:
        """Return widths of a key head's part of the first projection: what is convolved (query, key, values), output
        gates of its value heads, their write strengths, their steps."""
        value_width = self.norm.shape[0]
        channels = self.convolution.shape[0]
        heads = self.log_decay.shape[0]
        groups = (channels - heads * value_width) // (2 * self.key_width)
        per_group = heads // groups
        return channels // groups, per_group * value_width, per_group, per_group


def gated_delta_net(projected: Tensor, weights: GatedDeltaWeights, documents: TokenDocuments | None = None) -> Tensor:
    """Compute a gated delta net from its projected inputs (section 3.4 of the paper, as Qwen3-Next has it).

    Args:
        projected: [b, s, g, 2 dk + 2 r dv + 2 r]: for each key head [query; key; its values; their output gates; their
            write strengths; their steps].
        documents: Which tokens belong together; None: every row is one document.

    Returns:
        [b, s, g x r x dv], the input of the output projection, in the dtype of `projected`.
    """
    widths = weights.group_widths
    per_group = widths[2]
    qkv, gate, write, step = projected.split(widths, dim=-1)
    qkv = F.silu(causal_convolution(qkv.flatten(2), weights.convolution, documents)).unflatten(-1, (-1, widths[0]))
    query, key, value = qkv.split([weights.key_width, weights.key_width, widths[1]], dim=-1)
    value, gate = (t.unflatten(-1, (per_group, -1)) for t in (value, gate))
    rate = wide(weights.log_decay).exp().view(-1, per_group)
    decay = -rate * F.softplus(wide(step) + wide(weights.step_bias).view(-1, per_group))
    out = gated_delta_rule(query, key, value, decay, write.sigmoid(), documents)
    return gated_norm(out, gate, weights.norm, weights.norm_epsilon).flatten(2)


def wide(x: Tensor) -> Tensor:
    """Return x in float32, or in float64 where it has that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def causal_convolution(x: Tensor, weight: Tensor, documents: TokenDocuments | None = None) -> Tensor:
    """Convolve each channel with the tokens up to its own, none of them from another document.

    Args:
        x: [b, s, channels].
        weight: [channels, taps]; the last tap is the token itself.

    Returns:
        [b, s, channels], a view of channels-first memory.
    """
    x = x.transpose(1, 2)
    length = x.shape[2]
    before = weight.shape[1] - 1
    place = None
    if documents is not None and documents.count > 1:
        # as many zeros between documents as there are tokens that a tap reaches back
        place = torch.arange(length, device=x.device) + before * documents.numbers
        gaps = x.new_zeros(*x.shape[:2], length + before * (documents.count - 1))
        x = gaps.index_copy(2, place, x)
    out = F.conv1d(x, weight[:, None], padding=before, groups=weight.shape[0])
    out = out[..., :length] if place is None else out.index_select(2, place)
    return out.transpose(1, 2)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return rms_norm(x) * weight * silu(gate) over the last dimension, in the gate's dtype.

    x is first rounded to that dtype, as are the normed values before their product with the weight.
    """
    normed = F.rms_norm(wide(x.to(gate.dtype)), weight.shape, eps=epsilon).to(gate.dtype)
    return (weight * normed * F.silu(wide(gate))).to(gate.dtype)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, write: Tensor, documents: TokenDocuments | None = None
) -> Tensor:
    """Read from a state S [dk, dv] that decays and that each token corrects, for every value head.

    Token by token: S = exp(decay) S; S = S + write key (value - key S)^T; output = query S / sqrt(dk), with queries and
    keys of length 1. Chunk by chunk (section 3.3 of the paper): a triangular system gives a chunk's corrections from
    the state before it, and only that state passes from chunk to chunk. A document begins with S = 0 wherever in a
    chunk that is. In float32, or float64 where the inputs are.

    On a GPU inputs of 16 bits go through the kernels of flash-linear-attention where it is installed (`fla-core`). Its
    call was compared with the signature and the texts of release 0.6.0; the kernels themselves have not run here.

    The sums of decays in float64 cost 4 % of the time of the torch form (0.255 s for 0.246 s, forward and backward of
    2,048 tokens with 8 value heads of 128 on one CPU thread) and 2 % of its peak (579 MiB for 569 MiB, the process's).

    Args:
        query: [b, s, g, dk].
        key: [b, s, g, dk].
        value: [b, s, g, r, dv].
        decay: [b, s, g, r], logarithms, at most 0.
        write: [b, s, g, r], write strengths from 0 to 1.
        documents: Which tokens belong together; None: every row is one document.

    Returns:
        [b, s, g, r, dv].
    """
    kernel = fla_kernel() if value.is_cuda and value.dtype in (torch.bfloat16, torch.float16) else None
    if kernel is not None:
        return rule_by_kernel(kernel, query, key, value, decay, write, documents)
    length = value.shape[1]
    query, key = (_chunks(_unit(wide(t)))[:, :, None] for t in (query, key))
    value = _chunks(wide(value)).movedim(-2, 2)
    decay, write = (_chunks(wide(t)).movedim(-1, 2) for t in (decay, write))
    numbers = decay.new_zeros(length, dtype=torch.int64) if documents is None else documents.numbers
    numbers = F.pad(numbers, (0, -length % CHUNK), value=-1).view(-1, CHUNK)
    query = query * query.shape[-1] ** -0.5

    # which tokens see which, which see the state before the chunk, and which are in the state after it: [n, c, (c)]
    apart = (numbers[:, :, None] != numbers[:, None]).logical_or_(_above_diagonal(numbers.device))
    begun = torch.cat([numbers[:1, :1] - 1, numbers[:-1, -1:]]) != numbers
    ended = numbers[:, -1:] != numbers

    # decays between tokens, from the state before and to the state after: [b, g, r, n, c, (c)]; in float64, because the
    # sums run over all documents of a chunk, and in float32 their differences (and, backward, sums of gradients that
    # cancel) would carry the others' rounding errors
    total = decay.double().cumsum(dim=-1)
    between, until, since = (
        _exp_unless(hidden, difference.to(value.dtype))
        for hidden, difference in (
            (apart, total[..., :, None] - total[..., None, :]),
            (begun, total),
            (ended, total[..., -1:] - total),
        )
    )

    # inside chunks, all at once: corrections without the state before, and how they depend on it
    system = (key @ key.mT) * (between * write[..., None])
    sides = torch.cat([value * write[..., None], key * (until * write)[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    fixed, dependent = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    scores = (query @ key.mT) * between
    reads = query * until[..., None]
    writes = (key * since[..., None]).mT

    # from chunk to chunk; what the last token has of the state before is what remains of it after
    outs = []
    state = value.new_zeros(*value.shape[:3], key.shape[-1], value.shape[-1])
    parts = (t.unbind(3) for t in (fixed, dependent, scores, reads, writes, until[..., -1, None, None]))
    for fixed_i, dependent_i, scores_i, reads_i, writes_i, kept_i in zip(*parts, strict=True):
        corrections = fixed_i - dependent_i @ state
        outs.append(reads_i @ state + scores_i @ corrections)
        state = state * kept_i + writes_i @ corrections
    out = torch.stack(outs, dim=3).flatten(3, 4)[:, :, :, :length]
    return out.permute(0, 3, 1, 2, 4)


@cache
def fla_kernel() -> Callable[..., Any] | None:
    """Return flash-linear-attention's chunked gated delta rule; None where it is not installed."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return None
    return chunk_gated_delta_rule  # type: ignore[no-any-return]


def rule_by_kernel(
    kernel: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    write: Tensor,
    documents: TokenDocuments | None,
) -> Tensor:
    """Compute `gated_delta_rule` by a function with the arguments of flash-linear-attention's.

    It takes documents of one row only, as bounds: rows are laid end to end. Each value head gets its key head's query
    and key, as transformers gives them.
    """
    rows, length, groups, per_group, _ = value.shape
    query, key = (t.repeat_interleave(per_group, dim=2) for t in (query, key))
    value, decay, write = (t.flatten(2, 3) for t in (value, decay, write))
    bounds = {}
    if documents is not None:
        starts = documents.bounds[:-1] + length * torch.arange(rows)[:, None]
        host = torch.cat([starts.flatten(), torch.tensor([rows * length])])
        bounds = {"cu_seqlens": copy_to_device_async(host, value.device), "cu_seqlens_cpu": host}
        query, key, value, decay, write = (t.flatten(0, 1)[None] for t in (query, key, value, decay, write))
    out, _state = kernel(query, key, value, decay, write, use_qk_l2norm_in_kernel=True, **bounds)
    whole: Tensor = out.reshape(rows, length, groups, per_group, -1)
    return whole


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + NORM_EPSILON)


def _chunks(x: Tensor) -> Tensor:
    """[b, s, g, ...] to [b, g, n, c, ...], with zeros after the end."""
    padded = F.pad(x, (0, 0) * (x.dim() - 2) + (0, -x.shape[1] % CHUNK))
    return padded.unflatten(1, (-1, CHUNK)).movedim(3, 1)


def _above_diagonal(device: torch.device) -> Tensor:
    return torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=device).triu_(1)


def _exp_unless(hidden: Tensor, logarithms: Tensor) -> Tensor:
    """exp, and 0 where `hidden`, with no overflow there."""
    return logarithms.masked_fill(hidden, -torch.inf).exp()
