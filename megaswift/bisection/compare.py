"""Compares a trace with a reference tensor by tensor, on each rank by itself.

The reference is the Hugging Face model in a wider dtype. The tolerance of a tensor is 4 x the largest difference from
it of the model in the run's own dtype, in five runs whose weights are perturbed by one unit in the last place, and at
least four units in the last place. Differences are root mean squares over the elements that a rank holds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from megaswift.bisection.ahead import tokens_ahead
from megaswift.bisection.placement import Placement
from megaswift.bisection.reference import Microbatch, ReferenceStep, rows_of
from megaswift.bisection.trace_folder import (
    DIVISION,
    GATHERED,
    GRADIENT,
    INPUT,
    KINDS,
    LOSS,
    OF_PARAMETERS,
    OUTPUT,
    RECOMPUTED,
    WEIGHT,
    Entry,
    RankTrace,
    Trace,
)
from megaswift.errors import Problem, UserError
from megaswift.parallel.layout import Coordinates, Layout

RUNS = 5
FACTOR = 4.0
LABELS = "labels"
WITHIN_A_LAYER = re.compile(r"layers\.(\d+)\.")
NEEDED = ("input_ids", LABELS, "loss_weights", "valid")


Order = tuple[int, int, int, float, str]
"""(Kind, data-parallel rank, micro-batch, place in the order of computation, name)."""


@dataclass
class Verdict:
    """A tensor of a rank against the reference's."""

    rank: int
    place: Coordinates
    kind: str
    name: str
    microbatch: int | None
    difference: float
    """Root mean square, over that of the reference's tensor; absolute where that is 0."""
    expected: float = 0.0
    """The tolerance, in the same unit."""
    order: Order = (0, 0, 0, 0, "")

    @property
    def bad(self) -> bool:
        """True if the difference exceeds the tolerance, or is not a number."""
        return not self.difference <= self.expected

    @property
    def ratio(self) -> float:
        """The difference over the tolerance; infinite where it is no finite number."""
        if self.difference == 0:
            return 0.0
        return self.difference / self.expected if self.expected and math.isfinite(self.difference) else math.inf


@dataclass
class Comparison:
    """All verdicts, in the order of computation, and the names without a counterpart."""

    verdicts: list[Verdict]
    skipped: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    """Micro-batches with the rows of another replica: a fault, unless the data have such rows."""

    @property
    def first(self) -> Verdict | None:
        """The first tensor that differs; of several ranks the one that is furthest beyond its tolerance."""
        bad = [v for v in self.verdicts if v.bad]
        if not bad:
            return None
        same = [v for v in bad if v.order == bad[0].order]
        return max(same, key=lambda v: v.ratio)

    def like(self, verdict: Verdict) -> list[Verdict]:
        """The same tensor on all ranks that have it."""
        return [v for v in self.verdicts if v.order == verdict.order]


@dataclass
class _Held:
    """A rank's tensor that has been compared, without its elements."""

    verdict: Verdict
    entry: Entry
    shape: torch.Size
    scale: float


def inputs_of(trace: Trace) -> dict[Microbatch, dict[str, Tensor]]:
    """Return the rows of every micro-batch, from the first rank of each data-parallel replica.

    Raises:
        UserError: A micro-batch lacks an input, or there is none.
    """
    rows: dict[Microbatch, dict[str, Tensor]] = {}
    for rank in range(trace.layout.world_size):
        place = trace.layout.coordinates(rank)
        if place.tp == place.cp == place.pp == 0:
            for entry, tensor in trace.rank(rank).tensors.items():
                if entry.kind == INPUT and entry.microbatch is not None:
                    rows.setdefault((place.dp, entry.microbatch), {})[entry.name] = tensor
    missing = sorted({name for fields in rows.values() for name in NEEDED if name not in fields})
    if missing or not rows:
        rule = f"lacks inputs: {', '.join(missing or NEEDED)}"
        raise UserError(Problem(str(trace.folder), rule, "docs/bisect.md describes them"))
    return dict(sorted(rows.items()))


def compare(
    trace: Trace,
    placement: Placement,
    base: ReferenceStep,
    perturbed: Iterable[ReferenceStep],
    center: ReferenceStep | None = None,
) -> Comparison:
    """Compare every tensor of a trace with the reference.

    Args:
        trace: The trace of the run.
        placement: What each rank holds.
        base: The reference.
        perturbed: The same steps from perturbed weights, from which the tolerances follow.
        center: The step around which `perturbed` lie; None: `base`.
    """
    rows = inputs_of(trace)
    order = base.order()
    found = Comparison([], repeated=list(_repeated(rows)))
    held: list[_Held] = []
    skipped: set[str] = set()
    names: dict[int, set[str]] = {}
    trained: set[str] = set()
    changed: set[str] = set()
    for rank in trace.ranks():
        place = trace.layout.coordinates(rank.rank)
        names[rank.rank] = {entry.name for entry in rank.tensors}
        trained |= {entry.name for entry in rank.tensors if entry.kind == GRADIENT}
        changed |= {entry.name for entry in rank.tensors if entry.kind in (WEIGHT, GATHERED)}
        found.verdicts += _inputs(rank, place, rows)
        for entry, tensor in rank.tensors.items():
            if entry.kind == INPUT:
                continue
            if entry.kind == RECOMPUTED:
                found.verdicts += _recomputed(rank, place, entry, order)
                continue
            part = _part(entry, tensor.shape, base, placement, rows, place)
            if part is None:
                skipped.add(f"{entry.name} ({entry.kind})")
                continue
            verdict = Verdict(
                rank.rank,
                place,
                entry.kind,
                entry.name,
                entry.microbatch,
                difference=part.distance(tensor),
                expected=torch.finfo(tensor.dtype).eps * _rms(part.elements),
                order=_order(entry, place, order),
            )
            held.append(_Held(verdict, entry, tensor.shape, _rms(part.elements)))
    layers = placement.spec.num_layers if center is None else None  # two traces may be of a model's first layers
    found.verdicts += misplaced_layers(names, layers, trace.layout)
    if trained:
        found.verdicts += _untrained(names, _without_gradient(trained, changed, base, placement), placement)
    around = base if center is None else center
    for step in perturbed:
        whole = _WholeNoise(around, step, placement)
        for one in held:
            place = one.verdict.place
            parts = [_part(one.entry, one.shape, s, placement, rows, place) for s in (around, step)]
            here, there = [part.elements for part in parts if part is not None]
            noise = max(_rms(there - here), whole.of(one.entry, place.dp))
            one.verdict.expected = max(one.verdict.expected, noise)
    for one in held:
        unit = one.scale or 1.0
        one.verdict.difference /= unit
        one.verdict.expected *= FACTOR / unit
        found.verdicts.append(one.verdict)
    found.verdicts.sort(key=lambda v: (v.order, v.rank))
    found.skipped = sorted(skipped)
    return found


class _WholeNoise:
    """The distance that whole tensors move in a perturbed step. Shards with few elements may move little by chance."""

    def __init__(self, base: ReferenceStep, step: ReferenceStep, placement: Placement) -> None:
        self.base = base
        self.step = step
        self.placement = placement
        self._known: dict[tuple[Any, ...], float] = {}

    def of(self, entry: Entry, dp: int) -> float:
        """The root mean square over all elements."""
        parameter = entry.kind in OF_PARAMETERS
        key = (entry.kind, entry.name, None if parameter else (dp, entry.microbatch))
        if key not in self._known:
            pairs: list[tuple[Tensor, Tensor]] = []
            if parameter:
                found = self.placement.parameter(entry.name)
                a = self.base.parameters[entry.kind]
                b = self.step.parameters[entry.kind]
                pairs = [] if found is None else [(a[name], b[name]) for name in found.hf]
            else:
                pairs = [(self.base.activations[key], self.step.activations[key])]  # type: ignore[index]
            self._known[key] = _rms(torch.cat([(a - b).reshape(-1) for a, b in pairs]))
        return self._known[key]


@dataclass(frozen=True)
class _Part:
    """The reference's part of a tensor as a rank should have it."""

    elements: Tensor
    mask: Tensor | None = None
    """Of an activation the rows that are no padding."""
    comparable: bool = True
    """False where the rank has another number of tokens than any share of the rows."""

    def distance(self, tensor: Tensor) -> float:
        """The root mean square of the differences from the rank's tensor."""
        if not self.comparable:
            return math.inf
        own = tensor.reshape(-1) if self.mask is None else tensor[self.mask][:, : self.elements.shape[1]]
        return _rms(own.float() - self.elements)


def _part(
    entry: Entry,
    shape: torch.Size,
    step: ReferenceStep,
    placement: Placement,
    rows: Mapping[Microbatch, Mapping[str, Tensor]],
    place: Coordinates,
) -> _Part | None:
    """The counterpart of a tensor of this shape; None where there is none."""
    if entry.kind in OF_PARAMETERS:
        known = step.parameters.get(entry.kind, {})
        part = placement.cut_parameter(known, entry, shape.numel(), place)
        return _Part(part) if part is not None and part.numel() == shape.numel() else None
    assert entry.microbatch is not None
    number = (place.dp, entry.microbatch)
    whole = step.activations.get((entry.kind, entry.name, number))
    if whole is None or entry.kind == LOSS:
        return None if whole is None else _Part(whole)
    lie = rows_of(rows[number], tokens_ahead(entry.name))
    if placement.tokens(shape[0], lie, place) is None:
        return _Part(whole, comparable=False)
    found = placement.cut_activation(whole, shape, entry, lie, place)
    return None if found is None else _Part(found[0][found[1]], found[1])


def _order(entry: Entry, place: Coordinates, order: Mapping[tuple[str, str], int]) -> Order:
    """Kinds one after the other; within the passes micro-batch after micro-batch, of parameters from the head down."""
    kind = KINDS.index(entry.kind)
    if entry.kind in OF_PARAMETERS:
        layer = int(entry.name.split(".")[1]) if entry.name.startswith("layers.") else None
        outer = 1 if entry.name.startswith("embedding") else -math.inf
        return kind, 0, 0, outer if layer is None else -layer, entry.name
    return kind, place.dp, entry.microbatch or 0, order.get((entry.kind, entry.name), 0), entry.name


def _inputs(rank: RankTrace, place: Coordinates, rows: Mapping[Microbatch, Mapping[str, Tensor]]) -> Iterator[Verdict]:
    """Ranks of one data-parallel replica have the same rows, whose labels are the next tokens."""
    for entry, tensor in rank.tensors.items():
        if entry.kind != INPUT or entry.microbatch is None:
            continue
        fields = rows.get((place.dp, entry.microbatch), {})
        want = fields.get(entry.name)
        same = want is not None and want.shape == tensor.shape and torch.equal(want, tensor)
        if entry.name == LABELS:
            same = same and _labels_are_next_tokens(fields)
        order: Order = (0, place.dp, entry.microbatch, 0, entry.name)
        difference = 0.0 if same else math.inf
        yield Verdict(rank.rank, place, INPUT, entry.name, entry.microbatch, difference, 0.0, order)


def misplaced_layers(names: Mapping[int, Iterable[str]], count: int | None, layout: Layout) -> list[Verdict]:
    """Return a verdict for each layer that is on no pipeline stage, or on several.

    Args:
        names: The names of each rank's tensors. A stage records its input under the name of the layer before it, so
            that only names within a layer count.
        count: How many layers the model has; None: up to the last that a rank has.
        layout: The ranks' grid.
    """
    stages: dict[int, set[int]] = {}
    for rank, of_rank in names.items():
        for match in filter(None, map(WITHIN_A_LAYER.match, of_rank)):
            stages.setdefault(int(match[1]), set()).add(layout.coordinates(rank).pp)
    if not stages:
        return []  # the trace has whole layers only
    for layer in range(max(stages) if count is None else count):
        stages.setdefault(layer, set())
    found = []
    last = 0
    for layer, of_layer in sorted(stages.items()):
        last = max(of_layer, default=last)
        if len(of_layer) != 1:
            name = f"layers.{layer}"
            difference = float(len(of_layer) - 1) if of_layer else math.inf
            rank = layout.rank(pp=last)
            order: Order = (-1, 0, 0, layer, name)
            found.append(Verdict(rank, layout.coordinates(rank), DIVISION, name, None, difference, 0.0, order))
    return found


def _without_gradient(
    trained: Iterable[str], changed: Iterable[str], base: ReferenceStep, placement: Placement
) -> Iterator[str]:
    """Name the parameters that train in the reference, and of which no rank has a gradient."""
    known = base.parameters.get(GRADIENT, {})
    have = {name for parameter in trained for name in _folder_names(parameter, placement)}
    for parameter in sorted({*changed, *placement.adapters}):
        names = _folder_names(parameter, placement)
        trains = parameter in placement.adapters or any(name in known and known[name].any() for name in names)
        if trains and have.isdisjoint(names):
            yield parameter


def _folder_names(parameter: str, placement: Placement) -> Sequence[str]:
    """The names, in the folders of the model and its adapters, of the tensors that a parameter holds."""
    found = placement.parameter(parameter)
    return () if found is None else found.hf


def _untrained(names: Mapping[int, set[str]], missing: Iterable[str], placement: Placement) -> Iterator[Verdict]:
    """Yield a verdict for each parameter that has no gradient, on the first rank that has its weight."""
    for name in missing:
        rank = next((rank for rank, of_rank in names.items() if name in of_rank), 0)
        place = placement.layout.coordinates(rank)
        order = _order(Entry(GRADIENT, name), place, {})
        yield Verdict(rank, place, GRADIENT, name, None, math.inf, 0.0, order)


def _repeated(rows: Mapping[Microbatch, Mapping[str, Tensor]]) -> Iterator[str]:
    """Name micro-batches of different replicas with the same tokens."""
    pairs = combinations(rows.items(), 2)
    for ((replica, number), fields), ((other, other_number), others) in pairs:
        same = torch.equal(fields["input_ids"], others["input_ids"])
        if same and replica != other and fields["loss_weights"].any():
            yield f"micro-batch {number} of replica {replica}, micro-batch {other_number} of replica {other}"


def _recomputed(
    rank: RankTrace, place: Coordinates, entry: Entry, order: Mapping[tuple[str, str], int]
) -> Iterator[Verdict]:
    """Compare an output of a recomputation with that of the forward pass. Both are computed from the same numbers, and
    may differ by one unit in the last place where another kernel runs if gradients are needed. The last layer comes
    first, as in the backward pass."""
    forward = rank.tensors.get(Entry(OUTPUT, entry.name, entry.microbatch))
    if forward is None or entry.microbatch is None:
        return
    again = rank.tensors[entry]
    comparable = again.shape == forward.shape
    unit = _rms(forward) or 1.0
    difference = _rms(again.float() - forward.float()) / unit if comparable else math.inf
    layer = WITHIN_A_LAYER.match(f"{entry.name}.")
    depth = -int(layer[1]) if layer else 0
    kind = KINDS.index(RECOMPUTED)
    within = order.get((OUTPUT, entry.name), 0) / (len(order) + 1)
    at: Order = (kind, place.dp, entry.microbatch, depth + within, entry.name)
    expected = torch.finfo(forward.dtype).eps
    yield Verdict(rank.rank, place, RECOMPUTED, entry.name, entry.microbatch, difference, expected, at)


def _labels_are_next_tokens(fields: Mapping[str, Tensor]) -> bool:
    """Return whether each label that counts is the next token, where that token belongs to the same document."""
    ids, labels, weights = (fields[name] for name in ("input_ids", LABELS, "loss_weights"))
    counted = weights[:, :-1] != 0
    if "cu_seqlens" in fields:
        ends = fields["cu_seqlens"].long()[1:-1] - 1
        counted[:, ends] = False
    return torch.equal(labels[:, :-1][counted], ids[:, 1:][counted])


def _rms(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.float())) / math.sqrt(max(tensor.numel(), 1))


def facts(verdict: Verdict) -> dict[str, Any]:
    """A verdict as plain values; a difference that is no finite number is None."""
    place = verdict.place
    return {
        "name": verdict.name,
        "kind": verdict.kind,
        "microbatch": verdict.microbatch,
        "rank": verdict.rank,
        "coordinates": {axis: getattr(place, axis) for axis in ("tp", "cp", "dp", "pp", "ep")},
        "difference": verdict.difference if math.isfinite(verdict.difference) else None,
        "expected": verdict.expected,
    }
