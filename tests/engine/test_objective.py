"""What is reported of a global batch: means, differences of means, extremes, over micro-batches.

Covers: megaswift/engine/objective.py, megaswift/engine/reported_numbers.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megaswift import distributed
from megaswift.engine.diagnostics.compute_time import OwnComputeClock
from megaswift.engine.objective import GlobalBatchCounts, GlobalBatchLossCallback, StepReport
from megaswift.engine.protocol import StepResult
from megaswift.losses.contract import MaxMetric, MeanMetric, Metric, MinMetric, Reported, SumMetric
from tests.parity.pool import shared

ALONE: Any = SimpleNamespace(
    layout=SimpleNamespace(dp=1, pp=1), coordinates=SimpleNamespace(pp=0), device=torch.device("cpu"), groups=None
)


GAP = {"gap": ("a", "b")}


def objective(
    *parts: dict[str, Metric],
    shares: Sequence[float] = (),
    differences: Mapping[str, tuple[str, str]] = {},  # noqa: B006
) -> GlobalBatchLossCallback:
    """After micro-batches with these metrics and, where they are given, shares of one term."""
    kinds = {kind: tuple(n for n, m in parts[0].items() if isinstance(m, kind)) for kind in (MeanMetric, SumMetric)}
    kinds |= {kind: tuple(n for n, m in parts[0].items() if isinstance(m, kind)) for kind in (MaxMetric, MinMetric)}
    terms = {"loss": "labels"} if shares else {}
    declared = Reported(("labels",), terms, *kinds.values(), differences)
    made = GlobalBatchLossCallback(
        SimpleNamespace(reported=declared),  # type: ignore[arg-type]
        GlobalBatchCounts({"labels": 4.0}, 0, 0, len(parts)),
    )
    for i, part in enumerate(parts):
        made.rows.append(made.order.row({"loss": torch.tensor(shares[i])} if shares else {}, part))
    return made


def reported(*parts: dict[str, Metric], **more: Any) -> dict[str, float]:
    return dict(read(objective(*parts, **more)).metrics)


def read(objective: GlobalBatchLossCallback, *more: torch.Tensor, context: Any = ALONE) -> StepResult:
    """The result of a report that was read together with `more`."""
    rows: Any = [SimpleNamespace(sample_ids=None)] * len(objective.rows)
    report = StepReport(
        objective, GlobalBatchCounts({"labels": 4.0}, 0, 0, len(rows)), context, rows, OwnComputeClock([])
    )
    report.metrics["further"] = torch.tensor(7.0)
    assert report.read(more) == [float(t) for t in more]
    assert report.result.metrics["further"] == 7.0
    metrics = {name: value for name, value in report.result.metrics.items() if name != "further"}
    return replace(report.result, metrics=metrics)


def test_metrics_are_reduced_by_their_kind() -> None:
    a: dict[str, Metric] = {
        "mean": MeanMetric(3.0, 2),
        "sum": SumMetric(1.0),
        "high": MaxMetric(2.0),
        "low": MinMetric(2.0),
    }
    b: dict[str, Metric] = {
        "mean": MeanMetric(6.0, 1),
        "sum": SumMetric(4.0),
        "high": MaxMetric(-1.0),
        "low": MinMetric(-1.0),
    }
    assert reported(a, b) == {"mean": 3.0, "sum": 5.0, "high": 2.0, "low": -1.0}


def noted(name: str, real: Any, calls: list[str]) -> Any:
    def call(tensor: torch.Tensor) -> Any:
        calls.append(name)
        return real(tensor)

    return call


def test_the_device_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of several dtypes and plain numbers, terms and metrics: one `.tolist()`, no `float()` or `.item()`."""
    part: dict[str, Metric] = {
        "mean": MeanMetric(torch.tensor(6.0), torch.tensor(4)),
        "high": MaxMetric(torch.tensor([2.5], dtype=torch.bfloat16)),
        "low": MinMetric(1.0),
    }
    given = objective(part, part, shares=(0.5, 1.5), differences={"gap": ("mean", "mean")})
    reads: list[str] = []
    for name in ("tolist", "__float__", "item"):
        monkeypatch.setattr(torch.Tensor, name, noted(name, getattr(torch.Tensor, name), reads))
    norm = torch.tensor(3.0)
    rows: Any = [SimpleNamespace(sample_ids=None)] * 2
    report = StepReport(given, GlobalBatchCounts({"labels": 4.0}, 0, 0, 2), ALONE, rows, OwnComputeClock([]))
    assert report.read([norm]) == [3.0]
    result = report.result
    assert (result.loss, result.metrics) == (2.0, {"mean": 1.5, "high": 2.5, "low": 1.0, "gap": 0.0})
    assert [part.loss for part in result.parts] == [0.5, 1.5]
    assert (result.addends.terms, result.addends.means) == ({"loss": (8.0, 4.0)}, {"mean": (12.0, 8.0)})
    assert reads == ["tolist"]


def test_values_are_reduced_over_data_parallel_ranks_before_the_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank has the same sums, largest values of 5 and smallest of -5: one reduction, with the number beside
    the report that is to be added up over the same ranks; another group's has its own."""
    groups: list[Any] = []

    def all_reduce(tensor: torch.Tensor, group: Any) -> None:
        groups.append(group)
        if group != "dp":
            tensor.add_(1)
            return
        tensor[:5] *= 2  # the number beside, loss, sum, mean of two sums
        tensor[5 + 4 :] = 5.0

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [0, 1] if group == "dp" else [0, 2])
    part: dict[str, Metric] = {
        "mean": MeanMetric(torch.tensor(6.0), 4),
        "sum": SumMetric(3.0),
        "high": MaxMetric(torch.tensor(2.5)),
        "higher": MaxMetric(8.0),
        "low": MinMetric(1.0),
        "lower": MinMetric(torch.tensor(-9.0)),
    }
    given = objective(part, part, shares=(0.5, 1.5))
    both: Any = SimpleNamespace(**{**vars(ALONE), "layout": SimpleNamespace(dp=2, pp=1)})
    both.groups = SimpleNamespace(dp="dp")
    rows: Any = [SimpleNamespace(sample_ids=None)] * 2
    report = StepReport(given, GlobalBatchCounts({"labels": 4.0}, 0, 0, 2), both, rows, OwnComputeClock([]))
    assert report.read([torch.tensor(3.0), torch.tensor(7.0)], ["dp", "others"]) == [6.0, 8.0]
    result = report.result
    assert result.loss == 4.0 and [share.loss for share in result.parts] == [0.5, 1.5]
    assert result.metrics == {"mean": 1.5, "sum": 12.0, "high": 5.0, "higher": 8.0, "low": -5.0, "lower": -9.0}
    assert groups == ["others", "dp"]


def test_a_difference_is_taken_of_reduced_means() -> None:
    """4 - 1 = 3; a mean of the micro-batches' differences would be 2.5, and the second one has none."""
    found = reported(
        {"a": MeanMetric(6.0, 2), "b": MeanMetric(1.0, 2)},
        {"a": MeanMetric(6.0, 1), "b": MeanMetric(1.0, 0)},
        differences=GAP,
    )
    assert found == {"a": pytest.approx(4.0), "b": pytest.approx(1.0), "gap": pytest.approx(3.0)}


def test_a_mean_of_nothing_is_not_reported_nor_a_difference_from_it() -> None:
    assert reported({"a": MeanMetric(6.0, 2), "b": MeanMetric(0.0, 0)}, differences=GAP) == {"a": 3.0}


FEW: dict[str, Metric] = {
    "mean": MeanMetric(6.0, 4),
    "high": MaxMetric(2.5),
    "low": MinMetric(-1.0),
    "nothing": MeanMetric(0.0, 0),
}
OTHER: dict[str, Metric] = {"sum": SumMetric(torch.tensor(3.0))}
MANY: dict[str, Metric] = {f"m{n:02}": SumMetric(float(n)) for n in range(70)}


def through_pipeline(rank: int, world: int, payload: None) -> list[tuple[float, dict[str, float], int, int]]:
    """Objective, metrics, number of micro-batches with a loss and of messages with objects, of each report on this
    stage."""
    from megaswift.engine.process_group import init_default_and_gloo_process_groups

    init_default_and_gloo_process_groups("gloo", 60)
    last = rank == world - 1
    context: Any = SimpleNamespace(
        layout=SimpleNamespace(dp=1, pp=world),
        coordinates=SimpleNamespace(pp=rank),
        device=torch.device("cpu"),
        groups=SimpleNamespace(dp=None, pp=torch.distributed.group.WORLD),
    )
    found = []
    for part in (FEW, FEW, OTHER, MANY, MANY, FEW):
        given = objective(part, part, shares=(0.5, 1.5))
        given.rows = given.rows if last else []
        with patch.object(distributed, "broadcast_object", wraps=distributed.broadcast_object) as named:
            result = read(given, torch.tensor(float(rank)), context=context)
        found.append((result.loss, dict(result.metrics), len(result.parts), named.call_count))
    return found


@pytest.mark.process
def test_every_stage_of_a_pipeline_has_the_report_of_the_last() -> None:
    """Numbers travel, names do not: every stage has them from the loss."""
    few = {"mean": 1.5, "high": 2.5, "low": -1.0}
    many = {name: 2.0 * n for n, name in enumerate(MANY)}
    metrics = [few, few, {"sum": 6.0}, many, many, few]
    stages = shared("").run(f"{__name__}:through_pipeline", None, 3)
    for stage, found in enumerate(stages):
        assert [report[0] for report in found] == [2.0] * 6 and [report[1] for report in found] == metrics
        assert [report[2] for report in found] == [2 if stage == 2 else 0] * 6
        assert [report[3] for report in found] == [0] * 6


def test_a_loss_that_reports_other_names_than_it_declared_is_found() -> None:
    """Also one whose metric is of another kind: its numbers would stand in another one's place."""
    declared = objective({"a": MeanMetric(1.0, 1), "b": SumMetric(1.0)}).order
    for wrong in ({"a": MeanMetric(1.0, 1)}, {"a": MeanMetric(1.0, 1), "b": SumMetric(1.0), "c": SumMetric(1.0)}):
        with pytest.raises(AssertionError, match="declared"):
            declared.row({}, wrong)
    with pytest.raises(AssertionError):
        declared.row({}, {"a": SumMetric(1.0), "b": SumMetric(1.0)})
    with pytest.raises(AssertionError, match="terms"):
        declared.row({"loss": torch.tensor(1.0)}, {"a": MeanMetric(1.0, 1), "b": SumMetric(1.0)})
