"""The numbers that are reported of a global batch: their order, the same on every rank and pipeline stage, and what
sums and counts make of them. How they are added up over ranks: `objective`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megaswift.engine.protocol import Addends
from megaswift.losses.contract import MeanMetric, Metric, Reported


@dataclass(frozen=True)
class NamedReport:
    """What is reported of a global batch."""

    loss: float
    metrics: dict[str, float]
    addends: Addends


class ReportOrder:
    """The order of a loss's numbers: terms, sums, sums and counts of means, vectors, which add up; then those of which
    the largest and the smallest count. Names are sorted within each kind."""

    def __init__(self, reported: Reported) -> None:
        self.reported = reported
        self.terms = sorted(reported.terms, key=lambda name: f"{reported.terms[name]}/{name}")
        self.sums = sorted(reported.sums)
        self.means = sorted(reported.means)
        self.largest = sorted(reported.largest)
        self.smallest = sorted(reported.smallest)
        self.vectors = sorted(reported.addable)
        self.metrics = {*self.sums, *self.means, *self.vectors, *self.largest, *self.smallest}
        of_vectors = sum(reported.addable[name].size for name in self.vectors)
        self.added = len(self.terms) + len(self.sums) + 2 * len(self.means) + of_vectors
        """How many add up."""
        self.size = self.added + len(self.largest) + len(self.smallest)

    def row(self, terms: Mapping[str, Tensor], metrics: Mapping[str, Metric]) -> list[Tensor | float]:
        """Put the numbers of one micro-batch into the order of the report; each is a number, or a tensor [] or [n]."""
        assert terms.keys() == {*self.terms}, f"terms {sorted(terms)}, declared {self.terms}"
        assert metrics.keys() == self.metrics, f"metrics {sorted(metrics)}, declared {sorted(self.metrics)}"
        means = [metric for name in self.means if isinstance(metric := metrics[name], MeanMetric)]
        values: list[Tensor | float] = [terms[name] for name in self.terms]
        values += [_value(metrics[name]) for name in self.sums]
        values += [mean.sum for mean in means]
        values += [mean.count for mean in means]
        values += [_value(metrics[name]) for name in (*self.vectors, *self.largest, *self.smallest)]
        size = sum(value.numel() if isinstance(value, Tensor) else 1 for value in values)
        assert size == self.size, "a metric of another kind than declared"
        return values

    def named(self, numbers: Sequence[float], counts: Mapping[str, float]) -> NamedReport:
        """Return the report of a batch of these counts from its numbers in this order."""
        following = iter(numbers)
        terms = {name: next(following) for name in self.terms}
        terms = {name: value for name, value in terms.items() if name not in self.reported.apart}
        totals = {name: next(following) for name in self.sums}
        sums = [next(following) for _ in self.means]
        means = {name: (total, next(following)) for name, total in zip(self.means, sums, strict=True)}
        addable = self.reported.addable
        vectors = {name: tuple(next(following) for _ in range(addable[name].size)) for name in self.vectors}
        extremes = {name: next(following) for name in (*self.largest, *self.smallest)}
        divided_by = {name: counts[self.reported.terms[name]] for name in terms}
        addends = Addends(
            {name: (value * divided_by[name], divided_by[name]) for name, value in terms.items()},
            means,
            self.reported.differences,
            vectors,
            addable,
        )
        metrics = totals | ratios(means) | extremes | (terms if len(terms) > 1 else {})
        return NamedReport(sum(terms.values()), metrics | differences(addends, metrics), addends)


def _value(metric: Metric) -> Tensor | float:
    assert not isinstance(metric, MeanMetric)
    return metric.value


def ratios(means: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Divide sums by counts, without those that counted nothing."""
    return {name: total / count for name, (total, count) in means.items() if count}


def differences(addends: Addends, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the differences whose two means are known."""
    return {
        name: metrics[of] - metrics[less]
        for name, (of, less) in addends.differences.items()
        if of in metrics and less in metrics
    }
