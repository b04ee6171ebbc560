"""The tasks: each names its loss and its data, and the course of a run has no branch by task."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaswift.config import SwiftConfig
from megaswift.options.tasks import RL
from megaswift.options.tasks import TASKS as NAMES
from megaswift.run import build, course
from megaswift.run.dataset_task import DatasetTask
from megaswift.run.output import OutputFolder
from megaswift.run.plan import RunPlan
from megaswift.run.policy_task import PolicyTask
from megaswift.run.task import Task, TaskData, TaskParts
from megaswift.run.tasks import TASKS
from tests.trainers.tiny import TinyEngine, TinySource, tiny_loop


def test_each_task_says_where_its_batches_come_from() -> None:
    assert {*TASKS.names()} == {*NAMES}
    assert {t.name for t in TASKS if isinstance(t, PolicyTask)} == {*RL}
    assert all(isinstance(t, DatasetTask) for t in TASKS if t.name not in RL)


def test_the_course_of_a_run_has_no_branch_by_task() -> None:
    source = inspect.getsource(course)
    assert "trainers.rl" not in source and "task ==" not in source and "task in" not in source


@dataclass(frozen=True)
class OwnTask(Task):
    """Of a plugin, say: three steps on a source of its own."""

    def read(self, plan: RunPlan) -> tuple[RunPlan, TaskData]:
        tokenizer = SimpleNamespace(chat_template="")
        return replace(plan, fit="own"), TaskData(TinySource(), None, tokenizer=tokenizer, total_steps=3)

    def attach(self, plan: RunPlan, data: TaskData, engine: Any, rate: Callable[[int], float]) -> TaskParts:
        assert plan.fit == "own" and isinstance(engine, TinyEngine)
        return TaskParts(data.source, engines={"second": engine})


def test_a_task_brings_loss_data_and_engines_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`build_run` asks whatever task there is."""
    loss = tiny_loop(1).loss
    monkeypatch.setattr(
        build, "TASKS", SimpleNamespace(get=lambda name: OwnTask("own", "o", lambda cfg: loss, "p", "p"))
    )
    monkeypatch.setattr(build, "make_engine", lambda *_: TinyEngine())
    for name in ("load_start_weights", "step_flop_formula", "model_facts"):
        monkeypatch.setattr(build, name, lambda *_: {})
    monkeypatch.setattr(build, "run_hooks", lambda *_: ["first", "checkpoint"])
    cfg = SwiftConfig(task="sft", model="m", dataset="d", output_dir=str(tmp_path))
    context: Any = SimpleNamespace(layout=SimpleNamespace(dp=1))
    spec: Any = None
    seconds: dict[str, float] = {}
    built = build.build_run(RunPlan(cfg, spec, tmp_path, context, OutputFolder(tmp_path)), seconds, nullcontext)
    run = built.run
    assert (run.loss, run.total_steps, [*run.engines], run.hooks[1:]) == (loss, 3, ["second"], ["first", "checkpoint"])
    assert isinstance(run.data, TinySource) and {*seconds} == {"data", "model"}
