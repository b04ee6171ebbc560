"""What a task tells its source of batches."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaswift.data.batches.numbered import LoaderGeometry
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
