"""Which ranks are called slow, by the times of metrics.jsonl and by waits for data; a slow rank planted in a run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from megaswift import distributed
from megaswift.trainers.hooks.straggler import StragglerHook, slow_inputs, slow_rank
from tests.trainers.planted import run_with_fault

HOSTS = ["a", "a", "b", "b"]
SLOW = """\
import time
from torch.nn import functional

embed = functional.embedding

def slow(*values, **options):
    end = time.thread_time() + 0.3
    while time.thread_time() < end:
        pass
    return embed(*values, **options)

functional.embedding = slow
"""
"""Processor time, of which a busy machine gives this rank and the others equal parts."""


def line(rank: int, slowest: float, median: float) -> dict[str, float]:
    return {"rank_step_time_slowest": rank, "rank_step_time_max": slowest, "rank_step_time_median": median}


def test_a_slow_device() -> None:
    assert slow_rank({}, HOSTS, 1.3) == [] and slow_rank(line(2, 1.2, 1.0), HOSTS, 1.3) == []
    assert slow_rank(line(2, 1.5, 1.0), HOSTS, 1.3) == [
        "rank 2 (b) is slow: its passes take 1.5 s a step, 1.50 x the median rank"
    ]


def test_a_slow_input() -> None:
    assert slow_inputs([0.1, 0.1, 0.1, 0.5], HOSTS, 1.3) == [
        "rank 3 (b) is slow: waits 0.50 s a step for data, the median rank 0.10 s"
    ]
    assert slow_inputs([0.0, 0.0, 0.0, 0.04], HOSTS, 1.3) == [], "below a twentieth of a second"


def test_a_line_of_metrics_brings_the_means_since_the_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[list[float]] = []

    def added(own: list[float]) -> list[float]:
        sent.append(own)
        return own

    monkeypatch.setattr(distributed, "all_gather_objects", lambda host: [host, "other", "other"])
    monkeypatch.setattr(distributed, "all_sum", added)
    hook, loop = StragglerHook(1.3), SimpleNamespace(step=7)
    hook.on_start(loop)  # type: ignore[arg-type]
    for wait in (0.2, 0.4):
        hook.on_step(loop, SimpleNamespace(data_wait=wait))  # type: ignore[arg-type]
    hook.on_log(loop, line(1, 2.0, 1.0))
    hook.on_log(loop, {})
    assert sent == [[pytest.approx(0.3), 0.0, 0.0], [0.0, 0.0, 0.0]]
    text = capsys.readouterr().err
    assert "step 7: rank 1 (other) is slow: its passes take 2 s a step, 2.00 x" in text
    assert "step 7: rank 0" in text and text.count("step 7") == 2


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(("engine", "rank"), [("ddp", 1), ("megatron", 1), ("zero2", 1)])
def test_the_slow_rank_of_a_run_is_named(engine: str, rank: int, tmp_path: Path) -> None:
    done = run_with_fault(tmp_path, rank, SLOW, f"--engine {engine} --nproc_per_node 2 --max_steps 3 --log_straggler")
    assert done.returncode == 0, done.stderr
    last = [json.loads(text) for text in (tmp_path / "out/metrics.jsonl").read_text().splitlines()][-1]
    assert last["rank_step_time_slowest"] == rank and last["rank_step_time_max"] > 2 * last["rank_step_time_median"]
    assert f"step 3: rank {rank} (" in done.stderr and "is slow: its passes take" in done.stderr
