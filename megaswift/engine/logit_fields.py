"""Fields that losses read from rows of logits, and the gradient of those logits, for both engines.

Owns the arithmetic between products of hidden states and weights and the fields (`losses.contract.FIELDS`): one pass
over a tile of logits gives the sums that all fields need, one pass in backward writes the gradient. float32 exists for
a tile only. Where the products come from is the engines'.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaswift.engine.triton_support import runs_triton_kernels
from megaswift.engine.vocabulary_shard import VocabularyHeadShardSpec
from megaswift.parallel.head_memory import tile_rows

NO_LOGIT = -1e30
"""Maximum of a shard that has no real row of the vocabulary: finite, so that its differences are."""
MAXIMUM, OTHERS, AT_LABEL, WEIGHTED, SQUARES, SUM = range(6)
"""Rows of the statistics [6, t] of a shard, with m its largest logit l and e = exp(l - m): m; the sum of e without the
label's; the label's l, or 0 where another shard has it; sum of e (l - m); sum of e^2; sum of l - m. The last three are
0 unless a field needs them."""
SHIFT, INVERSE_TOTAL, LOG_TOTAL, LINEAR, LOGARITHMIC, QUADRATIC, CONSTANT, LABEL, LABEL_REST = range(9)
"""Rows of the coefficients [9, t] of the gradient: with p = exp(l - shift) / total,
d = p (linear + logarithmic log p + quadratic p) + constant, and at the label
d = p (linear + label + logarithmic log p + quadratic p) + constant + label x (1 - p), the last of which is given."""


@dataclass(frozen=True)
class VocabularyRows:
    """What the statistics of all shards give: fields, and what the gradient needs of each row."""

    fields: Tensor
    """float32 [f, t]."""
    kept: Tensor
    """float32 [3, t]: the largest logit, the sum of exp(l - largest), 1 - the label's probability."""


def logits_of(products: Tensor, shard: VocabularyHeadShardSpec) -> Tensor:
    """Convert products [r, n] without padding to float32 logits; may return the same tensor."""
    x = products.float()
    if shard.scale != 1.0:
        x = x * shard.scale
    if shard.softcap is not None:
        x = (x / shard.softcap).tanh_().mul_(shard.softcap)
    return x / shard.temperature if shard.temperature != 1.0 else x


def row_tiles(products: Tensor, width: int) -> Iterator[slice]:
    """Yield the rows of products that are converted to float32 at a time, `width` columns of them."""
    step = tile_rows(width, products.device.type)
    return (slice(a, a + step) for a in range(0, len(products), step))


def _triton_kernels(products: Tensor) -> Any:
    """The module of the Triton kernels where they can run on this tensor, or None."""
    if not runs_triton_kernels(products):
        return None
    return importlib.import_module("megaswift.engine.logit_fields_triton")


def row_statistics(products: Tensor, labels: Tensor, shard: VocabularyHeadShardSpec) -> Tensor:
    """Return this shard's statistics, float32 [6, t], of products [t, v] in any float type."""
    width = shard.columns(products.shape[1])
    stats = torch.zeros(6, len(products), dtype=torch.float32, device=products.device)
    if not width:
        stats[MAXIMUM] = NO_LOGIT
        return stats
    local, in_shard = shard.local_labels(labels, products.shape[1])
    kernels = _triton_kernels(products)
    if kernels is not None:
        kernels.write_row_statistics_by_triton(products[:, :width], (local, in_shard), shard, stats)
        return stats
    for rows in row_tiles(products, width):
        _write_tile_statistics(products[rows, :width], local[rows], in_shard[rows], shard, stats[:, rows])
    return stats


def _write_tile_statistics(
    products: Tensor, local: Tensor, in_shard: Tensor, shard: VocabularyHeadShardSpec, stats: Tensor
) -> None:
    """Statistics [6, r] of products [r, n]."""
    logits = logits_of(products, shard)
    top = logits.amax(dim=1)
    column = local[:, None]
    here = in_shard[:, None]
    at_label = logits.gather(1, column)
    shifted = logits - top[:, None]
    del logits
    if "mean_logit" in shard.fields:
        torch.sum(shifted, dim=1, out=stats[SUM])
    below = at_label - top[:, None]
    power = below.exp()
    powers = shifted.exp() if "entropy" in shard.fields else shifted.exp_()
    powers.scatter_(1, column, torch.where(here, 0.0, power))
    torch.sum(powers, dim=1, out=stats[OTHERS])
    stats[MAXIMUM] = top
    stats[AT_LABEL] = at_label.masked_fill_(~here, 0.0).squeeze(1)
    if "entropy" in shard.fields:
        own = (power * below).masked_fill_(~here, 0.0).squeeze(1)
        stats[WEIGHTED] = shifted.mul_(powers).sum(dim=1).add_(own)
    if "log_sum_sq" in shard.fields:
        stats[SQUARES] = powers.square_().sum(dim=1).add_(power.square_().masked_fill_(~here, 0.0).squeeze(1))


def join_shards(stats: Tensor, labels: Tensor, width: int, shard: VocabularyHeadShardSpec) -> VocabularyRows:
    """Compute the fields from every shard's statistics [6, t], in two reductions over the vocabulary's ranks.

    The label's exponential is kept out of the sum of the others. Where its probability is near 1, log p = -log1p(rest)
    and 1 - p from this sum keep all digits, which 1 - p of a rounded p would lose.
    """
    top = shard.reduce(stats[MAXIMUM].clone(), dist.ReduceOp.MAX)
    below = stats[MAXIMUM] - top
    factor = below.exp()
    in_shard = shard.local_labels(labels, width)[1]
    own = stats[OTHERS] + torch.where(in_shard, (stats[AT_LABEL] - stats[MAXIMUM]).exp(), 0.0)
    real = float(shard.columns(width))
    parts = {
        "others": stats[OTHERS] * factor,
        "at_label": torch.where(in_shard, stats[AT_LABEL] - top, 0.0),
        "weighted": (stats[WEIGHTED] + own * below) * factor,
        "squares": stats[SQUARES] * factor.square(),
        "sum": stats[SUM] + real * below,
        "count": torch.full_like(top, real),
    }
    needs = {"entropy": ("weighted",), "log_sum_sq": ("squares",), "mean_logit": ("sum", "count")}
    names = ["others", "at_label", *(n for field, parts_of in needs.items() if field in shard.fields for n in parts_of)]
    sums = dict(zip(names, shard.reduce(torch.stack([parts[n] for n in names])), strict=True))
    others = sums["others"]
    at_label = sums["at_label"]
    label_exp = at_label.exp()
    total = others + label_exp
    log_total = total.log()
    compute: dict[str, Callable[[], Tensor]] = {
        "logprobs": lambda: torch.where(others < label_exp, -torch.log1p(others / label_exp), at_label - log_total),
        "entropy": lambda: log_total - sums["weighted"] / total,
        "logsumexp": lambda: log_total + top,
        "correct": lambda: (at_label == 0).float(),
        "mean_logit": lambda: sums["sum"] / sums["count"] + top,
        "log_sum_sq": lambda: sums["squares"].log() - 2 * log_total,
    }
    fields = torch.stack([compute[name]() for name in shard.fields])
    return VocabularyRows(fields, torch.stack([top, total, others / total]))


def gradient_coefficients(grads: Tensor, rows: VocabularyRows, width: int, shard: VocabularyHeadShardSpec) -> Tensor:
    """Return float32 coefficients [9, t] from the fields' gradients [f, t], with the factors of temperature and scale.

    One reduction over the vocabulary's ranks where the mean logit has a gradient.
    """
    by_name = {name: grads[i] for i, name in enumerate(shard.fields) if name in shard.differentiable}
    values = {name: rows.fields[i] for i, name in enumerate(shard.fields)}
    top, total, rest = rows.kept
    zero = torch.zeros_like(top)
    label, entropy, squares = (by_name.get(name, zero) for name in ("logprobs", "entropy", "log_sum_sq"))
    linear = by_name.get("logsumexp", zero) - label
    quadratic = zero
    constant = zero
    if "entropy" in by_name:
        linear = linear - entropy * values["entropy"]
    if "log_sum_sq" in by_name:
        linear = linear - 2 * squares
        quadratic = 2 * squares / values["log_sum_sq"].exp()
    if "mean_logit" in by_name:
        vocabulary = torch.full((), float(shard.columns(width)), device=top.device)
        constant = by_name["mean_logit"] / shard.reduce(vocabulary)
    factor = shard.scale / shard.temperature
    scaled = torch.stack([linear, -entropy, quadratic, constant, label, label * rest]) * factor
    return torch.cat([torch.stack([top, 1 / total, total.log()]), scaled])


def write_gradient(
    products: Tensor, labels: Tensor, coefficients: Tensor, shard: VocabularyHeadShardSpec, out: Tensor
) -> None:
    """Write the gradient of products [t, v] from the coefficients [9, t] into `out` [t, v], which may be `products`."""
    width = shard.columns(products.shape[1])
    local, in_shard = shard.local_labels(labels, products.shape[1])
    kernels = _triton_kernels(products)
    if kernels is not None and width:
        kernels.write_logit_gradient_by_triton(
            products[:, :width], (local, in_shard), coefficients, shard, out[:, :width]
        )
    elif width:
        for rows in row_tiles(products, width):
            labels_of = local[rows], in_shard[rows]
            out[rows, :width] = _tile_gradient(products[rows, :width], *labels_of, coefficients[:, rows], shard)
    out[:, width:] = 0


def _tile_gradient(
    products: Tensor, local: Tensor, in_shard: Tensor, coefficients: Tensor, shard: VocabularyHeadShardSpec
) -> Tensor:
    """float32 [r, n] from products [r, n], which stay as they are."""
    logits = logits_of(products, shard)
    c = coefficients[:, :, None]
    column = local[:, None]
    shifted = logits - c[SHIFT]
    at_label = shifted.gather(1, column)
    p = at_label.exp() * c[INVERSE_TOTAL]
    slope = c[LINEAR] + c[LABEL] + c[LOGARITHMIC] * (at_label - c[LOG_TOTAL]) + c[QUADRATIC] * p
    label = p * slope + c[CONSTANT] + c[LABEL_REST]
    if {"entropy", "log_sum_sq"}.isdisjoint(shard.differentiable):
        d = shifted.exp_().mul_(c[LINEAR] * c[INVERSE_TOTAL])
    else:
        powers = shifted.exp()
        d = shifted.sub_(c[LOG_TOTAL]).mul_(c[LOGARITHMIC]).add_(c[LINEAR])
        powers *= c[INVERSE_TOTAL]
        d.addcmul_(powers, c[QUADRATIC]).mul_(powers)
    if "mean_logit" in shard.differentiable:
        d += c[CONSTANT]
    d.scatter_(1, column, torch.where(in_shard[:, None], label, d.gather(1, column)))
    if shard.softcap is not None:
        d *= logits.mul_(shard.temperature / shard.softcap).square_().neg_().add_(1)
    return d
