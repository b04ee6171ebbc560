"""The vocabulary-parallel head: hidden states to the log-probabilities, entropies, ... that a loss reads.

Owns the vocabulary head. The full logits of a batch are never gathered; where they are large they are not even kept:
the forward pass runs over chunks of tokens and the backward pass computes each chunk's logits again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

KEEP_BYTES = 1 << 28
"""Probabilities of a micro-batch up to this size are kept for the backward pass (no second product with the head)."""


@dataclass(frozen=True)
class VocabularyHeadShardSpec:
    """This rank's part of the vocabulary."""

    first: int
    """Vocabulary id of the first row."""
    real: int
    """Rows that are not padding."""
    group: dist.ProcessGroup
    temperature: float
    fields: tuple[str, ...]
    """Which outputs, in order; `logprobs` first when asked for."""
    differentiable: tuple[str, ...]
    """Those of `fields` that have a gradient."""
    scale: float = 1.0
    """Factor on the products of hidden states and weights."""
    softcap: float | None = None
    """Scaled products become cap x tanh(product / cap), before the temperature (Gemma 2, arXiv:2408.00118, section
    2.2)."""

    def reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """All-reduce over the vocabulary's ranks, in place."""
        if self.group.size() > 1:
            dist.all_reduce(x, op, self.group)
        return x


def _logits(hidden: Tensor, weight: Tensor, shard: VocabularyHeadShardSpec) -> tuple[Tensor, Tensor | None]:
    """float32 [t, v]; padding rows of the vocabulary can never be chosen. With a soft cap also its derivative [t,
    v]."""
    out, slope = (hidden @ weight.t()).float(), None
    if shard.scale != 1.0:
        out *= shard.scale
    if shard.softcap is not None:
        out = torch.tanh_(out.div_(shard.softcap))
        slope = 1 - out.square()
        out *= shard.softcap
    if shard.temperature != 1.0:
        out /= shard.temperature
    if shard.real < out.shape[1]:
        out[:, max(shard.real, 0) :] = float("-inf")
    return out, slope


def _local_labels(labels: Tensor, shard: VocabularyHeadShardSpec, width: int) -> tuple[Tensor, Tensor]:
    """(label within this shard, clamped; whether it lies here), each [t]."""
    local = labels - shard.first
    in_shard = (local >= 0) & (local < width)
    return local.clamp(0, width - 1), in_shard


def _set_label(x: Tensor, local: Tensor, in_shard: Tensor, value: Tensor) -> Tensor:
    """x [t, v] with `value` [t] in the label's column of the rows whose label lies in this shard; in place."""
    column = local[:, None]
    return x.scatter_(1, column, torch.where(in_shard[:, None], value[:, None], x.gather(1, column)))


def _forward_chunk(logits: Tensor, labels: Tensor, shard: VocabularyHeadShardSpec) -> tuple[Tensor, Tensor, Tensor]:
    """(fields [f, t], probabilities [t, v], 1 - the label's probability [t]); overwrites `logits`.

    The label's exponential is kept out of the sum of the others. Where its probability is near 1, log p = -log1p(rest)
    and 1 - p from this sum keep all digits, which 1 - p of a rounded p would lose.
    """
    biggest = shard.reduce(logits.max(dim=-1).values, dist.ReduceOp.MAX)
    logits -= biggest[:, None]
    local, in_shard = _local_labels(labels, shard, logits.shape[1])
    at_label = shard.reduce(logits.gather(1, local[:, None]).squeeze(1).masked_fill(~in_shard, 0.0))
    values: dict[str, Tensor] = {"correct": (at_label == 0).float()}
    if "mean_logit" in shard.fields:
        values["mean_logit"] = _mean_logit(logits, shard) + biggest
    shifted = logits.clone() if "entropy" in shard.fields else None
    label_exp = at_label.exp()
    probs = _set_label(logits.exp_(), local, in_shard, torch.zeros_like(label_exp))
    others = shard.reduce(probs.sum(dim=-1))
    total = others + label_exp
    log_total = total.log()
    probs = _set_label(probs, local, in_shard, label_exp).div_(total[:, None])
    values["logprobs"] = torch.where(others < label_exp, -torch.log1p(others / label_exp), at_label - log_total)
    values["logsumexp"] = log_total + biggest
    if shifted is not None:
        weighted = (probs * shifted.clamp(min=torch.finfo(torch.float32).min)).sum(dim=-1)
        values["entropy"] = log_total - shard.reduce(weighted)
    if "log_sum_sq" in shard.fields:
        values["log_sum_sq"] = shard.reduce(probs.square().sum(dim=-1)).log()
    return torch.stack([values[name] for name in shard.fields]), probs, others / total


def _mean_logit(logits: Tensor, shard: VocabularyHeadShardSpec) -> Tensor:
    real = max(min(shard.real, logits.shape[1]), 0)
    sums = torch.stack([logits[:, :real].sum(dim=-1), torch.full_like(logits[:, 0], float(real))])
    sums = shard.reduce(sums)
    return sums[0] / sums[1]


def _backward_chunk(
    grads: Tensor, out: Tensor, probs: Tensor, rest: Tensor, labels: Tensor, shard: VocabularyHeadShardSpec
) -> Tensor:
    """Gradient of the final logits [t, v] from the fields' gradients [f, t] and 1 - the label's probability, `rest`
    [t]; overwrites `probs` where only log-probabilities are wanted."""
    by_name = {name: grads[i] for i, name in enumerate(shard.fields) if name in shard.differentiable}
    values = {name: out[i] for i, name in enumerate(shard.fields)}
    g = by_name.get("logprobs")
    local, in_shard = _local_labels(labels, shard, probs.shape[1])
    extra = torch.zeros_like(probs if set(by_name) - {"logprobs"} else probs[:0])
    if "logsumexp" in by_name:
        extra += by_name["logsumexp"][:, None] * probs
    if "entropy" in by_name:
        log_p = probs.clamp(min=torch.finfo(torch.float32).tiny).log()
        extra -= (by_name["entropy"][:, None] * probs) * (log_p + values["entropy"][:, None])
    if "log_sum_sq" in by_name:
        extra += 2 * by_name["log_sum_sq"][:, None] * (probs.square() / values["log_sum_sq"].exp()[:, None] - probs)
    if "mean_logit" in by_name:
        real = max(min(shard.real, probs.shape[1]), 0)
        vocabulary = shard.reduce(torch.full((), float(real), device=probs.device))
        extra[:, :real] += by_name["mean_logit"][:, None] / vocabulary
    if g is None:
        result = extra if extra.numel() else torch.zeros_like(probs)
    else:
        result = probs.mul_(-g[:, None])
        result = _set_label(result, local, in_shard, g * rest)
        if extra.numel():
            result += extra
    return result / shard.temperature if shard.temperature != 1.0 else result


def _through_cap(d_logits: Tensor, slope: Tensor | None, shard: VocabularyHeadShardSpec) -> Tensor:
    """Gradient of the products of hidden states and weights from that of the logits before the temperature; in
    place."""
    if slope is not None:
        d_logits *= slope
    if shard.scale != 1.0:
        d_logits *= shard.scale
    return d_logits


class VocabularyHeadFunction(torch.autograd.Function):
    """(hidden [t, h], weight [v, h], labels [t]) to the fields [f, t] in float32.

    The gradient of `hidden` is this shard's part: the caller's region function sums it over the tensor-parallel ranks.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, shard: VocabularyHeadShardSpec) -> Tensor:
        """The fields; keeps the probabilities where they are small."""
        copies = 1 if shard.softcap is None else 2
        rows = max(1, KEEP_BYTES // (4 * weight.shape[0] * copies))
        chunks = [slice(a, a + rows) for a in range(0, max(1, hidden.shape[0]), rows)]
        parts, keep, rest, slope = [], None, None, None
        for c in chunks:
            logits, slope = _logits(hidden[c], weight, shard)
            fields, keep, rest = _forward_chunk(logits, labels[c], shard)
            parts.append(fields)
        out = torch.cat(parts, dim=1)
        ctx.chunks, ctx.shard = chunks, shard
        if len(chunks) > 1:
            keep = rest = slope = None
        ctx.save_for_backward(hidden, weight, labels, out, keep, rest, slope)
        return out

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Gradients of `hidden` and `weight`, chunk by chunk."""
        hidden, weight, labels, out, probs, rest, slope = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight: Tensor | None = None
        repeated = replace(ctx.shard, fields=ctx.shard.differentiable)
        for c in ctx.chunks:
            if len(ctx.chunks) > 1:
                logits, slope = _logits(hidden[c], weight, repeated)
                _, probs, rest = _forward_chunk(logits, labels[c], repeated)
            d_logits = _backward_chunk(grads[:, c], out[:, c], probs, rest, labels[c], ctx.shard)
            d_logits = _through_cap(d_logits, slope, ctx.shard).to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[c] = d_logits @ weight
            if ctx.needs_input_grad[1]:
                part = d_logits.t() @ hidden[c]
                if d_weight is None:
                    d_weight = part if len(ctx.chunks) == 1 else part.float()
                else:
                    d_weight += part
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None
