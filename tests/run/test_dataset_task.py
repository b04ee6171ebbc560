"""What a task tells its source of batches."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.batches.step_packing import StepPacking
from megaswift.errors import ConfigError
from megaswift.parallel.layout import Layout
from megaswift.run.dataset_task import limit_microbatches
from megaswift.run.task import TaskData
from megaswift.run.tasks import TASKS
from tests.data.batches.test_loader import source
from tests.data.makers import config
from tests.trainers.tiny import TinyEngine


@pytest.mark.parametrize(("impl", "steps"), [("local", 1), ("none", 0)])
def test_no_batch_is_prepared_while_cuda_graphs_are_captured(impl: str, steps: int, tmp_path: Path) -> None:
    """Megatron-Core captures them in the first step, in which no other thread may allocate pinned memory."""
    rows, evaluation = source(tmp_path, 8, LoaderGeometry())
    cfg = config(tmp_path, str(tmp_path / "d.jsonl")).replace(cuda_graph_impl=impl, padding_free=False)
    engine: Any = TinyEngine()
    engine.prepare_ahead = None
    plan: Any = SimpleNamespace(cfg=cfg, geometry=LoaderGeometry, context=SimpleNamespace(coordinates=None))
    parts = TASKS.get("sft").attach(plan, TaskData(rows, evaluation), engine, lambda step: 0.0)
    assert parts.data is rows and rows.alone == steps


def test_a_limit_below_the_longest_padded_sample(tmp_path: Path) -> None:
    """A layout that pads rows to multiples of 128 tokens needs 128 where samples have fewer."""
    rows, _ = source(tmp_path, 8, LoaderGeometry(row_multiple=128))
    longest = int(rows.data.docs.length.max())
    assert longest < 128
    cfg = config(tmp_path, str(tmp_path / "d.jsonl")).replace(padding_free=False)
    spec: Any = None
    with pytest.raises(ConfigError, match="is less than the longest sample takes: 128, in multiples of 128"):
        limit_microbatches(cfg, longest, spec, Layout(1), rows, None)
    limit_microbatches(cfg, 300, spec, Layout(1), rows, None)
    assert rows.data.step_packing == StepPacking(256, limited=True, padded=True)
