"""The divergence of a model from its teacher at each row of logits, and the gradient of those logits, for both engines.

Owns the arithmetic: one pass over tiles of logits gives the normalizers of both softmaxes, a second the divergence, and
one pass in backward writes the gradient. Each rank has a part of the vocabulary; ranks exchange some numbers for each
row, never logits. float32 exists for a tile only.

With a = log q of the model, b = log p of the teacher and d = b - a, every term comes from d and the larger of p and q.
The terms of a pure KL are p d - p + q, whose sum is the same and none of which is negative: an error of a normalizer
then changes the sum in second order only, and nearly equal distributions keep their digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megaswift.engine.logit_fields import NO_LOGIT, logits_of, row_tiles
from megaswift.engine.teacher_head import TeacherHead
from megaswift.engine.vocabulary_shard import VocabularyHeadShardSpec
from megaswift.losses.contract import Batch, Divergence
from megaswift.parallel.head_memory import head_chunks

HIDDEN_FIELD = "teacher_hidden"
LOGPROBS_FIELD = "teacher_logprobs"
IDS_FIELD = "teacher_ids"
TEACHER_FIELDS = (HIDDEN_FIELD, LOGPROBS_FIELD, IDS_FIELD)
"""Names of what a batch has of its teacher."""
LEAST_TAIL = -math.expm1(-1e-7)
"""Smallest probability of all tokens that a teacher does not list, as in TRL: the listed ones may sum to 1 and more
by rounding."""
TOP, LOG_TOTAL, TEACHER_TOP, TEACHER_LOG_TOTAL, MEAN = range(5)
"""Rows of the numbers [5, t] that the gradient needs of a whole teacher: largest logits and logs of the sums of
exp(l - largest), and the mean over q of u (`_pull`)."""
LISTED_TOP, LOG_OTHERS, TAIL, LISTED = range(4)
"""First rows of the numbers [3 + k, t] that the gradient needs of a teacher's largest: the model's largest logit, the
log of the sum of exp(l - largest) over tokens that are not listed, the gradient of the tail, and those of the listed
tokens."""

Product = Callable[[Tensor, Tensor], Tensor]
"""hidden [r, h] and weight [v, h] to the products [r, v]."""


def without_teacher(batch: Batch) -> Batch:
    """Return the batch without the outputs of a teacher."""
    return replace(batch, fields={name: t for name, t in batch.fields.items() if name not in TEACHER_FIELDS})


@dataclass(frozen=True)
class TeacherOutputs:
    """What a batch has of its teacher, [..., n] each: hidden states, or the largest log-probabilities and their
    tokens. An object of its own, so that no wrapper of a model casts its tensors."""

    hidden: Tensor | None = None
    logprobs: Tensor | None = None
    ids: Tensor | None = None

    @classmethod
    def of_fields(cls, fields: Mapping[str, Tensor]) -> TeacherOutputs:
        """Read the fields of a batch."""
        if HIDDEN_FIELD in fields:
            return cls(hidden=fields[HIDDEN_FIELD])
        return cls(logprobs=fields[LOGPROBS_FIELD], ids=fields[IDS_FIELD])

    def with_tensors(self, function: Callable[[Tensor], Tensor]) -> TeacherOutputs:
        """Return what `function` makes of the tensors."""
        changed = {name: function(t) for name, t in vars(self).items() if t is not None}
        return TeacherOutputs(**changed)

    def rows(
        self, head: TeacherHead | None, divergence: Divergence, shard: VocabularyHeadShardSpec, product: Product
    ) -> TeacherRows:
        """Return the teacher of these rows, [t, n] each.

        Args:
            head: The teacher's; None where its largest log-probabilities are given.
            divergence: The divergence that is asked for.
            shard: This rank's part of the model's vocabulary.
            product: Makes the teacher's products.
        """
        student = replace(shard, temperature=divergence.temperature, fields=(), differentiable=())
        if self.hidden is None:
            assert self.logprobs is not None and self.ids is not None
            return LargestTeacher(self.logprobs, self.ids, student, divergence.beta)
        assert head is not None, "Engine.set_teacher_head was not called"
        whole = WholeTeacher(self.hidden, head, student, divergence.beta, product)
        if divergence.topk is None:
            return whole
        logprobs, ids = whole.largest(divergence.topk)
        return LargestTeacher(logprobs, ids, student, divergence.beta)


def largest_of_teacher(
    hidden: Tensor, head: TeacherHead | None, shard: VocabularyHeadShardSpec, k: int
) -> tuple[Tensor, Tensor]:
    """Compute a teacher's `k` largest log-probabilities, float32 [t, k], and their tokens, int64 [t, k], from hidden
    states [t, h]. Collective over the vocabulary's ranks; `shard` has the temperature."""
    assert head is not None, "Engine.set_teacher_head was not called"

    def product(states: Tensor, weight: Tensor) -> Tensor:
        return states @ weight.t()

    return WholeTeacher(hidden, head, shard, 0.0, product).largest(k)


class TeacherRows(Protocol):
    """The teacher of the rows of a micro-batch."""

    def divergence(self, products: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the divergence, float32 [r], of the model's products [r, v] at `rows`, and the numbers [n, r] that
        the gradient needs. Collective over the vocabulary's ranks."""

    def write_gradient(self, products: Tensor, rows: slice, numbers: Tensor, grads: Tensor, out: Tensor) -> None:
        """Write the gradient of products [r, v] from the gradient of the divergence [r] into `out` [r, v], which may
        be `products`."""


@dataclass(frozen=True)
class _Logs:
    """log q, log p and log p - log q, of the same shape."""

    a: Tensor
    b: Tensor
    d: Tensor


@dataclass(frozen=True)
class WholeTeacher:
    """A teacher whose distribution over the vocabulary is computed from its hidden states [t, h]."""

    hidden: Tensor
    head: TeacherHead
    student: VocabularyHeadShardSpec
    beta: float
    product: Product

    @property
    def _shard(self) -> VocabularyHeadShardSpec:
        return replace(self.student, real=self.head.columns, scale=self.head.scale, softcap=self.head.softcap)

    def _products(self, products: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """The products of both, over the tokens of both that this rank has."""
        width = min(self.student.columns(products.shape[1]), self.head.columns)
        weight = self.head.weight[:width]
        return products[:, :width], self.product(self.hidden[rows].to(weight.dtype), weight)

    def divergence(self, products: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """In three reductions: the largest logits, the sums of exponentials, and the sums of the divergence."""
        own, taught = self._products(products, rows)
        student = self.student
        teacher = self._shard

        # The normalizers of both
        parts = torch.stack([*_normalizer(own, student), *_normalizer(taught, teacher)])
        tops = student.reduce(parts[::2].clone(), dist.ReduceOp.MAX)
        totals = student.reduce(parts[1::2] * (parts[::2] - tops).exp())
        numbers = torch.stack([tops[0], totals[0].log(), tops[1], totals[1].log(), torch.zeros_like(tops[0])])

        # The divergence, and the mean of u
        sums = torch.zeros(2, len(own), dtype=torch.float32, device=own.device)
        for some in row_tiles(own, own.shape[1]) if own.shape[1] else ():
            logs, _ = self._logs(own[some], taught[some], numbers[:, some])
            sums[0, some] = _terms(logs, self.beta).sum(1)
            if self.beta:
                sums[1, some] = (logs.a.exp() * _pull(logs.d, self.beta)).sum(1)
        sums = student.reduce(sums)
        numbers[MEAN] = sums[1]
        return sums[0], numbers

    @torch.no_grad()
    def largest(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the teacher's `k` largest log-probabilities at each row, float32 [t, k], and their tokens, int64
        [t, k]. Where the vocabulary is smaller, -inf fills up. Collective over the vocabulary's ranks."""
        weight = self.head.weight[: self.head.columns]
        device = self.hidden.device
        width = len(weight) * self.hidden.element_size()
        parts = []
        for chunk in head_chunks(len(self.hidden), max(width, 1), device.type, False):
            products = self.product(self.hidden[chunk.start : chunk.stop].to(weight.dtype), weight)
            top, total = _normalizer(products, self._shard)
            largest = self.student.reduce(top.clone(), dist.ReduceOp.MAX)
            log_total = self.student.reduce(total * (top - largest).exp()).log() + largest
            values = torch.full((len(products), k), -torch.inf, dtype=torch.float32, device=device)
            ids = torch.zeros(values.shape, dtype=torch.int64, device=device)
            for some in row_tiles(products, len(weight)) if len(weight) else ():
                found = logits_of(products[some], self._shard).topk(min(k, len(weight)))
                values[some, : found.values.shape[1]] = found.values
                ids[some, : found.indices.shape[1]] = found.indices + self.student.first
            values, ids = self._of_all_ranks(values, ids)
            best = values.topk(k)
            parts.append((best.values - log_total[:, None], ids.gather(1, best.indices)))
        return torch.cat([values for values, _ in parts]), torch.cat([ids for _, ids in parts])

    def _of_all_ranks(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """[t, ranks x k] each, from [t, k] of each of the vocabulary's ranks."""
        group = self.student.group
        if group is None or group.size() == 1:
            return values, ids
        gathered = []
        for own in (values, ids):
            every = [torch.empty_like(own) for _ in range(group.size())]
            dist.all_gather(every, own.contiguous(), group=group)
            gathered.append(torch.cat(every, dim=1))
        return gathered[0], gathered[1]

    def _logs(self, own: Tensor, taught: Tensor, numbers: Tensor) -> tuple[_Logs, Tensor]:
        """The logs of probabilities and the model's logits, of tiles of products."""
        n = numbers[:, :, None]
        logits = logits_of(own, self.student)
        a = (logits - n[TOP]).sub_(n[LOG_TOTAL])
        b = (logits_of(taught, self._shard) - n[TEACHER_TOP]).sub_(n[TEACHER_LOG_TOTAL])
        return _Logs(a, b, b - a), logits

    def write_gradient(self, products: Tensor, rows: slice, numbers: Tensor, grads: Tensor, out: Tensor) -> None:
        """Without a reduction; the teacher's products are made again."""
        own, taught = self._products(products, rows)
        width = own.shape[1]
        factor = grads * (self.student.scale / self.student.temperature)
        for some in row_tiles(own, width) if width else ():
            logs, logits = self._logs(own[some], taught[some], numbers[:, some])
            gradient = _gradient(logs, numbers[MEAN, some, None], self.beta).mul_(factor[some, None])
            out[some, :width] = _through_softcap(gradient, logits, self.student)
        out[:, width:] = 0


@dataclass(frozen=True)
class LargestTeacher:
    """A teacher of which the largest log-probabilities [t, k] and their tokens [t, k] are known. All other tokens are
    one further outcome, the tail. Tokens that the model does not have, and those of probability 0, are in the tail."""

    logprobs: Tensor
    ids: Tensor
    student: VocabularyHeadShardSpec
    beta: float

    def _columns(self, width: int, rows: slice) -> tuple[Tensor, Tensor]:
        """[r, k] each: this rank's column of the listed tokens, `width` where it has none, and whether it has one."""
        ids = self.ids[rows].long() - self.student.first
        here = (ids >= 0) & (ids < width) & self.logprobs[rows].isfinite()
        return torch.where(here, ids, width), here

    def divergence(self, products: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """In two reductions: the largest logit, and sums of exponentials with the listed tokens' logits."""
        student = self.student
        width = student.columns(products.shape[1])
        columns, here = self._columns(width, rows)

        # The model's log-probabilities of the listed tokens and of the tail
        top = torch.full((len(products),), NO_LOGIT, dtype=torch.float32, device=products.device)
        others = torch.zeros_like(top)
        listed = torch.zeros(columns.shape, dtype=torch.float32, device=products.device)
        for some in row_tiles(products, width) if width else ():
            shifted, top[some] = _shifted_with_spare_column(logits_of(products[some, :width], student))
            listed[some] = shifted.gather(1, columns[some])
            others[some] = shifted.scatter_(1, columns[some], -torch.inf)[:, :width].exp_().sum(1)
        largest = student.reduce(top.clone(), dist.ReduceOp.MAX)
        below = top - largest
        at_listed = torch.where(here, listed + below[:, None], 0.0).t()
        parts = torch.cat([(others * below.exp())[None], at_listed, here.t().float()])
        parts = student.reduce(parts)
        k = len(at_listed)
        others, listed, known = parts[0], parts[1 : 1 + k], parts[1 + k :] > 0
        log_total = (others + torch.where(known, listed.exp(), 0.0).sum(0)).log()
        log_others = others.clamp(min=torch.finfo(torch.float32).tiny).log()
        tail = log_others - log_total
        least = tail < math.log(LEAST_TAIL)

        # Outcomes [k + 1, r]: those that are none have two equal probabilities, and so no part in anything
        taught = torch.where(known, self.logprobs[rows].t().float(), -torch.inf)
        rest = (-taught.double().logsumexp(0).clamp(max=-1e-7).expm1()).log().float()  # 1 less what is near 1
        a = torch.cat([torch.where(known, listed - log_total, 0.0), tail.clamp(min=math.log(LEAST_TAIL))[None]])
        b = torch.cat([torch.where(known, taught, 0.0), rest[None]])
        logs = _Logs(a, b, b - a)
        values = _terms(logs, self.beta).sum(0)

        # Their gradients; a tail at its least has none of its own
        free = torch.ones_like(a)
        free[-1] = (~least).float()
        if self.beta:
            q = torch.cat([a[:-1], tail[None]]).exp()
            pull = _pull(logs.d, self.beta) * free
            slope = ((q * pull).sum(0) - pull) * _weight(self.beta)
            gradient = q * slope
        else:
            bound = b[-1].exp() * least
            gradient = _gradient(logs, a, 0.0) - a.exp() * bound
            gradient[-1] = torch.where(least, tail.exp() * (1 - bound), gradient[-1])
        return values, torch.cat([largest[None], log_others[None], gradient[-1:], gradient[:-1]])

    def write_gradient(self, products: Tensor, rows: slice, numbers: Tensor, grads: Tensor, out: Tensor) -> None:
        """Tokens of the tail share its gradient by their probabilities."""
        student = self.student
        width = student.columns(products.shape[1])
        columns = self._columns(width, rows)[0]
        factor = grads * (student.scale / student.temperature)
        listed = (numbers[LISTED:] * factor).t()
        top = numbers[LISTED_TOP, :, None]
        log_others = numbers[LOG_OTHERS, :, None]
        tail = (numbers[TAIL] * factor)[:, None]
        for some in row_tiles(products, width) if width else ():
            logits = logits_of(products[some, :width], student)
            gradient = logits.new_zeros(len(logits), width + 1)
            torch.exp((logits - top[some]).sub_(log_others[some]), out=gradient[:, :width])
            gradient *= tail[some]
            gradient.scatter_(1, columns[some], listed[some])
            out[some, :width] = _through_softcap(gradient[:, :width], logits, student)
        out[:, width:] = 0


def _normalizer(products: Tensor, shard: VocabularyHeadShardSpec) -> tuple[Tensor, Tensor]:
    """float32 [t] each: the largest logit and the sum of exp(l - largest) of products [t, n]."""
    width = products.shape[1]
    top = torch.full((len(products),), NO_LOGIT, dtype=torch.float32, device=products.device)
    total = torch.zeros_like(top)
    for rows in row_tiles(products, width) if width else ():
        logits = logits_of(products[rows], shard)
        top[rows] = logits.amax(1)
        total[rows] = (logits - top[rows, None]).exp_().sum(1)
    return top, total


def _shifted_with_spare_column(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [r, n] less their largest, with one column more, and the largest."""
    top = logits.amax(1)
    shifted = logits.new_zeros(len(logits), logits.shape[1] + 1)
    torch.sub(logits, top[:, None], out=shifted[:, :-1])
    return shifted, top


def _terms(logs: _Logs, beta: float) -> Tensor:
    """The terms of the divergence.

    With x = -|d|, the smaller of p and q is e^x times the larger, and has the weight w in m: beta or 1 - beta.
    """
    d = logs.d
    x = -d.abs()
    below = x.expm1()
    ratio_x = x.exp() * x
    larger = torch.maximum(logs.a, logs.b).exp()
    if beta in (0, 1):
        first_is_larger = d > 0 if beta == 0 else d < 0
        return larger * torch.where(first_is_larger, below - x, ratio_x - below)
    w = torch.where(d > 0, 1 - beta, beta)
    mixed = w * below
    return larger * (w * ratio_x - (1 + mixed) * mixed.log1p())


def _pull(d: Tensor, beta: float) -> Tensor:
    """u = log m - log q, for beta above 0."""
    if beta == 1:
        return d
    w = torch.where(d > 0, 1 - beta, beta)
    return (w * (-d.abs()).expm1()).log1p() + d.clamp(min=0)


def _weight(beta: float) -> float:
    """The factor of the gradient for beta above 0: the divergence's derivative by q_i is -(1 - beta) u_i and a
    constant, for beta 1 -u_i and a constant."""
    return 1.0 if beta == 1 else 1 - beta


def _gradient(logs: _Logs, mean: Tensor, beta: float) -> Tensor:
    """The gradient of the model's logits at the divergence's temperature; `mean` is that of u over q."""
    if beta == 0:  # q - p
        larger = torch.maximum(logs.a, logs.b).exp()
        return larger.mul_((-logs.d.abs()).expm1()).mul_(torch.where(logs.d > 0, 1.0, -1.0))
    return (mean - _pull(logs.d, beta)).mul_(logs.a.exp()).mul_(_weight(beta))


def _through_softcap(gradient: Tensor, logits: Tensor, shard: VocabularyHeadShardSpec) -> Tensor:
    """Multiply a tile's gradient by the soft cap's derivative."""
    if shard.softcap is None:
        return gradient
    return gradient * (1 - (logits * (shard.temperature / shard.softcap)).square())
