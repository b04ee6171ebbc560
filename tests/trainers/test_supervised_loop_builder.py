"""What a loop of supervised training tells its source of batches."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaswift.data.numbered_rows_batch_source import LoaderGeometry
from megaswift.losses.sft import CrossEntropy
from megaswift.trainers.supervised_loop_builder import build_supervised_loop
from tests.data.makers import config
from tests.data.test_loader import source
from tests.trainers.tiny import TinyEngine


@pytest.mark.parametrize(("impl", "steps"), [("local", 1), ("none", 0)])
def test_no_batch_is_prepared_while_cuda_graphs_are_captured(impl: str, steps: int, tmp_path: Path) -> None:
    """Megatron-Core captures them in the first step, in which no other thread may allocate pinned memory."""
    rows, evaluation = source(tmp_path, 8, LoaderGeometry())
    cfg = config(tmp_path, str(tmp_path / "d.jsonl")).replace(cuda_graph_impl=impl, padding_free=False)
    engine: Any = TinyEngine()
    engine.prepare_ahead = None
    build = SimpleNamespace(
        cfg=cfg,
        spec=None,
        layout=engine.layout,
        resumed=None,
        task=SimpleNamespace(loss=lambda cfg: CrossEntropy()),
        data=lambda: (rows, evaluation),
        engine=lambda fresh, total_steps: engine,
        hooks=lambda engine, evaluation: [],
        preparation=lambda: None,
    )
    session: Any = SimpleNamespace(build=build, seconds={}, memory_advice=nullcontext)
    assert build_supervised_loop(session).loop.source.alone == steps
