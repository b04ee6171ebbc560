"""Which ranks are called slow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megaswift import distributed
from megaswift.trainers.straggler import StragglerHook, product_seconds, slow_ranks

HOSTS = ("a", "a", "b", "b")


def test_a_slow_device_and_a_slow_input() -> None:
    assert slow_ranks(HOSTS, (1.0, 1.1, 1.2, 0.9), (0.0, 0.0, 0.01, 0.0), 1.3) == []
    assert slow_ranks(HOSTS, (0.001, 0.001, 0.0015, 0.001), (0.1, 0.1, 0.1, 0.5), 1.3) == [
        "rank 3 (b) is slow: waits 0.50 s a step for data, the median rank 0.10 s",
        "rank 2 (b) is slow: a matrix product takes 1.50 x the median time",
    ]


def test_waits_below_a_twentieth_of_a_second_are_left_out() -> None:
    assert slow_ranks(HOSTS, (1.0,) * 4, (0.0, 0.0, 0.0, 0.04), 1.3) == []


def test_a_line_of_metrics_brings_the_means_since_the_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[Any] = []

    def gathered(own: Any) -> list[Any]:
        sent.append(own)
        return [own, ("other", 1.0, 0.0), ("other", 1.0, 0.0)]

    monkeypatch.setattr(distributed, "all_gather_objects", gathered)
    hook, loop = StragglerHook(1.3, lambda: 2.0), SimpleNamespace(step=7)
    for wait in (0.2, 0.4):
        hook.on_step(loop, SimpleNamespace(data_wait=wait))  # type: ignore[arg-type]
    hook.on_log(loop, {})  # type: ignore[arg-type]
    hook.on_log(loop, {})  # type: ignore[arg-type]
    assert [one[1:] for one in sent] == [(2.0, pytest.approx(0.3)), (2.0, 0.0)]
    text = capsys.readouterr().err
    assert text.count("step 7: rank 0") == 3 and "2.00 x the median" in text


def test_the_product_takes_time() -> None:
    assert 0 < product_seconds() < 5
