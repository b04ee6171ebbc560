"""What the numbers of a report are: where each lies among the values of micro-batches, its name, and what sums and
counts make of it.

Owns terms, means, differences, largest and smallest. How they are summed over ranks: `global_batch_loss_and_metrics`.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megaswift.engine.protocol import Addends
from megaswift.losses.contract import DifferenceMetric, MaxMetric, MeanMetric, Metric, MinMetric, SumMetric

ReportParts = tuple[Mapping[str, Any], Mapping[str, Metric]]
"""Of a micro-batch: values of terms by `denominator/name`, metrics by name."""


@dataclass(frozen=True)
class NamedReport:
    """What is reported of a global batch."""

    loss: float
    metrics: dict[str, float]
    addends: Addends


def metric_operands(metrics: Mapping[str, Metric]) -> Iterator[Tensor | float]:
    """The values of metrics, in the order of their fields; a difference has none of its own."""
    for metric in metrics.values():
        if not isinstance(metric, DifferenceMetric):
            yield from vars(metric).values()


@dataclass(frozen=True)
class ReportPlaces:
    """Where in `GlobalBatchLossCallback.values` the numbers are that make up one reported value."""

    add: dict[str, list[int]]
    """Those that add up; a mean is two sums."""
    high: dict[str, list[int]]
    low: dict[str, list[int]]

    @classmethod
    def of(cls, parts: Sequence[ReportParts]) -> ReportPlaces:
        """By the kinds of metrics; names in order, the same on every rank."""
        add: dict[str, list[int]] = {}
        high: dict[str, list[int]] = {}
        low: dict[str, list[int]] = {}
        place = itertools.count()
        for terms, metrics in parts:
            for name in terms:
                add.setdefault(f"term/{name}", []).append(next(place))
            for name, metric in metrics.items():
                if isinstance(metric, MeanMetric):
                    add.setdefault(f"sum/{name}", []).append(next(place))
                    add.setdefault(f"count/{name}", []).append(next(place))
                elif isinstance(metric, SumMetric):
                    add.setdefault(f"total/{name}", []).append(next(place))
                elif isinstance(metric, MaxMetric):
                    high.setdefault(name, []).append(next(place))
                elif isinstance(metric, MinMetric):
                    low.setdefault(name, []).append(next(place))
        return cls(*(dict(sorted(kind.items())) for kind in (add, high, low)))

    def names(self) -> tuple[tuple[str, ...], ...]:
        """Of `joined` values, in their order."""
        return tuple(self.add), tuple(self.high), tuple(self.low)

    def joined(self, values: Sequence[float]) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        """(sums, largest, smallest) by name."""
        return (
            {name: sum(values[i] for i in where) for name, where in self.add.items()},
            {name: max(values[i] for i in where) for name, where in self.high.items()},
            {name: min(values[i] for i in where) for name, where in self.low.items()},
        )


@dataclass(frozen=True)
class ReportNames:
    """What reported numbers are, in their order."""

    kinds: tuple[tuple[str, ...], ...]
    """Sums, largest, smallest."""
    differences: tuple[tuple[str, str, str], ...]
    """Name of a metric that is the second one less the third."""

    @classmethod
    def of(cls, places: ReportPlaces, parts: Sequence[ReportParts]) -> ReportNames:
        """Those of the last stage."""
        metrics = {name: m for _, some in parts for name, m in some.items()}
        differences = ((name, m.of, m.less) for name, m in metrics.items() if isinstance(m, DifferenceMetric))
        return cls(places.names(), tuple(differences))

    @property
    def key(self) -> int:
        """Names them in a float64."""
        return int.from_bytes(hashlib.sha256(repr(self).encode()).digest()[:6], "big")

    def named(self, numbers: Sequence[float], counts: Mapping[str, float]) -> NamedReport:
        """The report of a batch of these counts, from numbers in the order of `kinds`."""
        following = iter(numbers)
        add, high, low = ({name: next(following) for name in names} for names in self.kinds)
        kinds: dict[str, dict[str, float]] = {"term": {}, "total": {}, "sum": {}, "count": {}}
        for key, value in add.items():
            kind, _, name = key.partition("/")
            kinds[kind][name] = value
        means = {name: (value, kinds["count"][name]) for name, value in kinds["sum"].items()}
        terms = {key.partition("/")[2]: value for key, value in kinds["term"].items()}
        addends = Addends(
            {
                name: (value * counts[denominator], counts[denominator])
                for key, value in kinds["term"].items()
                for denominator, _, name in [key.partition("/")]
            },
            means,
            {name: (of, less) for name, of, less in self.differences},
        )
        metrics = kinds["total"] | ratios(means) | high | low | (terms if len(terms) > 1 else {})
        return NamedReport(sum(terms.values()), metrics | differences(addends, metrics), addends)


def ratios(means: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Sums by counts; none of those that counted nothing."""
    return {name: total / count for name, (total, count) in means.items() if count}


def differences(addends: Addends, metrics: Mapping[str, float]) -> dict[str, float]:
    """Those of which both means are known."""
    return {
        name: metrics[of] - metrics[less]
        for name, (of, less) in addends.differences.items()
        if of in metrics and less in metrics
    }
