"""The tasks: each builds its own loop, and a session knows none of them."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from megaswift.config.data import RL
from megaswift.config.sections import TASKS as NAMES
from megaswift.trainers import session as session_module
from megaswift.trainers.loop import Loop
from megaswift.trainers.rl.rollout_loop_builder import build_rollout_loop
from megaswift.trainers.session import TrainingSession
from megaswift.trainers.supervised_loop_builder import LoopWithRunSummary, build_supervised_loop
from megaswift.trainers.tasks import TASKS, Task
from tests.trainers.tiny import tiny_loop


def test_each_task_names_what_builds_its_loop() -> None:
    assert {*TASKS.names()} == {*NAMES}
    assert {t.name for t in TASKS if t.build is build_rollout_loop} == {*RL}
    assert all(t.build is build_supervised_loop for t in TASKS if t.name not in RL)


def test_the_session_has_no_branch_by_task() -> None:
    source = inspect.getsource(session_module)
    assert "cfg.task" not in source and "trainers.rl" not in source


def test_a_task_brings_a_loop_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session restores, describes and runs what the task built, whatever it is."""
    loop: Loop = tiny_loop(2)
    built: list[Any] = []

    def build(session: TrainingSession) -> LoopWithRunSummary:
        built.append(session)
        return LoopWithRunSummary(loop, lambda: SimpleNamespace(title="own"))  # type: ignore[arg-type, return-value]

    own = Task("own", "a task of its own", lambda cfg: loop.loss, "pairs", "pairs", build=build)
    session: Any = SimpleNamespace(
        cfg=SimpleNamespace(data=SimpleNamespace(max_length=4)),
        spec=SimpleNamespace(max_positions=8),
        build=SimpleNamespace(task=own, resumed=None, layout=SimpleNamespace(world_size=1)),
        resume=lambda: None,
        upload=None,
    )
    monkeypatch.setattr(session_module.startup_summary, "summary_rows", lambda cfg, facts: [("title", facts.title)])
    monkeypatch.setattr(session_module.startup_summary, "render_summary", lambda title, rows: title)
    assert TrainingSession.prepare(session) is loop and built == [session] and session.rows == [("title", "own")]
