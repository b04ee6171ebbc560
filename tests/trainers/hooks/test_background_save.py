"""Checkpoints that are written while training goes on: when they count, what they hold, and what stops them."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megaswift.base.atomic_writes import write_hashed
from megaswift.errors import CheckpointError
from megaswift.folders.saved_steps import damaged_file_problems, load_manifest_or_none
from megaswift.trainers.checkpoints import CheckpointStore
from megaswift.trainers.hook import Hook
from megaswift.trainers.hooks import checkpoint
from megaswift.trainers.hooks.checkpoint import CheckpointHook, restore_run
from megaswift.trainers.loop import train
from tests.parity.pool import shared
from tests.trainers.inputs import write_inputs
from tests.trainers.run_ranks import Job
from tests.trainers.tiny import TinyEngine, tiny_loop


class StartedTinySave:
    """Writes what the engine's own `save` wrote when it started, once `gate` is open."""

    def __init__(self, directory: Path, content: bytes, gate: threading.Event, failure: str = "") -> None:
        self.directory, self.content, self.gate, self.failure = directory, content, gate, failure
        self.finished = 0

    def write(self) -> None:
        self.gate.wait(60)
        if self.failure:
            raise OSError(28, self.failure)
        self.entries = {"state.pt": write_hashed(self.directory / "state.pt", self.content)}

    def finish(self) -> dict[str, Any]:
        self.finished += 1
        return self.entries


class Gated(TinyEngine):
    """Each save has a gate of its own."""

    def __init__(self, failure: str = "") -> None:
        super().__init__()
        self.started: list[StartedTinySave] = []
        self.failure = failure

    def start_save(self, directory: Path) -> StartedTinySave:
        self.save(directory)
        content = (directory / "state.pt").read_bytes()
        (directory / "state.pt").unlink()
        self.started.append(StartedTinySave(directory, content, threading.Event(), self.failure))
        return self.started[-1]


class At(Hook):
    """Does something after a step, before the checkpoint hook."""

    def __init__(self, acts: dict[int, Any]) -> None:
        self.acts = acts

    def on_step(self, loop: Any, step: Any) -> None:
        self.acts.get(step.number, lambda: None)()


def loop_in(folder: Path, steps: int, acts: dict[int, Any], failure: str = "", every: int = 3) -> Any:
    hook = CheckpointHook(CheckpointStore(folder / "checkpoints"), every, None, {})
    hook.background = True
    loop = tiny_loop(steps, At(acts), hook)
    loop.engine = Gated(failure)
    return loop


def saved(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "checkpoints").glob("step-*"))


def test_a_step_counts_once_it_is_written_and_holds_its_own_state(tmp_path: Path) -> None:
    """Step 3 is written until step 5: steps 4 and 5 see no checkpoint, and it resumes to the losses of step 4 on."""
    seen: list[tuple[list[str], Path | None]] = []

    def look() -> None:
        seen.append((saved(tmp_path), CheckpointStore(tmp_path / "checkpoints").latest()))

    def release() -> None:
        look()
        loop.engine.started[0].gate.set()
        loop.hooks[1].pending.writer._thread.join(60)

    loop = loop_in(tmp_path, 8, {4: look, 5: release, 7: look}, every=3)
    loop.hooks[0].acts[8] = lambda: loop.engine.started[1].gate.set()
    train(loop)
    assert seen[:2] == [(["step-3.saving"], None)] * 2
    assert seen[2] == (["step-3", "step-6.saving"], tmp_path / "checkpoints" / "step-3")
    assert saved(tmp_path) == ["step-3", "step-6", "step-8"], "the end waits, and saves the last step"
    assert not [p for s in saved(tmp_path) for p in damaged_file_problems(tmp_path / "checkpoints" / s)]
    again = loop_in(tmp_path / "again", 8, {}, every=99)
    restore_run(again, tmp_path / "checkpoints" / "step-3", {})
    again.hooks[1].background = False
    train(again)
    for a, b in zip(again.engine.model.parameters(), loop.engine.model.parameters(), strict=True):
        assert torch.equal(a, b)


def said_times(text: str, step: int) -> list[tuple[float, float]]:
    """Of the lines of a step's checkpoint: after how many seconds it was complete, and how many training waited."""
    line = rf"step-{step}\b.*, complete after ([\d.]+) s; training waited ([\d.]+) s\)"
    return [(float(complete), float(waited)) for complete, waited in re.findall(line, text)]


class Clock:
    """Stands for `time` in the checkpoint hook: it moves when a test says so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(checkpoint, "time", made)
    return made


@pytest.mark.parametrize("slow", ["begin", "finish", "rotate"])
def test_the_reported_wait_covers_all_that_stops_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], clock: Clock, slow: str
) -> None:
    """The start of the save, marking the folder, deleting older ones, 40 s each; training does not wait for the writer
    of 5 s."""

    def written() -> None:
        clock.seconds += 5
        loop.engine.started[0].gate.set()
        loop.hooks[1].pending.writer._thread.join(60)

    loop = loop_in(tmp_path, 4, {3: written}, every=2)
    act, start = getattr(loop.hooks[1].store, slow), loop.engine.start_save

    def slowly(*arguments: Any) -> Any:
        clock.seconds += 40
        return act(*arguments)

    def started(directory: Path) -> Any:
        save = start(directory)
        if len(loop.engine.started) == 2:
            save.gate.set()
        return save

    setattr(loop.hooks[1].store, slow, slowly)
    loop.engine.start_save = started
    train(loop)
    assert said_times("".join(capsys.readouterr()), 2) == [(45.0, 40.0)]


def test_a_second_save_waits_for_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    """The save of step 6 begins while step 3 is written, whose gate opens once training waits for it: it is published
    first. What training has waited for a checkpoint stands in its line."""
    loop = loop_in(tmp_path, 7, {}, every=3)
    order: list[str] = []
    publish, start = loop.hooks[1].store.finish, loop.engine.start_save
    loop.hooks[1].store.finish = lambda step, *more: order.append(f"published {step}") or publish(step, *more)

    def started(directory: Path) -> Any:
        order.append(f"started {directory.parent.name}")
        return start(directory)

    def open_in_the_wait() -> None:
        writer = loop.hooks[1].pending.writer
        finish = writer.finish

        def waited(what: str) -> Any:
            clock.seconds += 7
            loop.engine.started[0].gate.set()
            return finish(what)

        writer.finish = waited

    loop.engine.start_save = started
    loop.hooks[0].acts = {5: open_in_the_wait, 7: lambda: loop.engine.started[1].gate.set()}
    train(loop)
    assert order == ["started step-3.saving", "published 3", "started step-6.saving", "published 6", "published 7"]
    assert said_times("".join(capsys.readouterr()), 3) == [(7.0, 7.0)]


def test_an_error_of_the_writer_ends_the_run_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    first = loop_in(tmp_path, 3, {}, every=3)
    first.hooks[1].background = False
    train(first)
    loop = loop_in(tmp_path, 9, {5: lambda: loop.engine.started[0].gate.set()}, "No space left", every=4)
    with pytest.raises(CheckpointError, match="step 4.*written in the background.*No space left"):
        train(loop)
    assert CheckpointStore(tmp_path / "checkpoints").latest() == tmp_path / "checkpoints" / "step-3"
    assert loop.engine.started[0].finished == 0


def test_after_another_error_it_is_given_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other ranks may have ended: nothing collective may happen, and nothing is waited for."""

    def fail() -> None:
        raise RuntimeError("lost")

    loop = loop_in(tmp_path, 9, {4: fail}, every=3)
    with pytest.raises(RuntimeError, match="lost"):
        train(loop)
    loop.engine.started[0].gate.set()
    assert "step 3 was still being written" in capsys.readouterr().err
    assert CheckpointStore(tmp_path / "checkpoints").latest() is None


def go_with_late_writers(rank: int, world: int, job: Job) -> Any:
    """A run whose files are written once training waits for them, when later steps have changed the weights."""
    from megaswift.trainers.hooks.checkpoint import BackgroundWriter
    from tests.trainers.run_ranks import go

    class Late(BackgroundWriter):
        def __init__(self, saves: Any) -> None:
            self.waited_for = threading.Event()
            super().__init__(saves)

        def _write(self) -> None:
            self.waited_for.wait(300)
            super()._write()

        def finish(self, what: str) -> Any:
            self.waited_for.set()
            return super().finish(what)

    checkpoint.BackgroundWriter = Late  # type: ignore[misc]  # this process ends with the job
    return go(rank, world, job)


@pytest.mark.process
def test_whole_runs_save_the_same_bytes_and_resume_bit_for_bit(tmp_path: Path) -> None:
    """Two ranks of the native engine with the distributed optimizer: every file of weights and states has the SHA-256
    that a synchronous save gives it, and a run that goes on from the background's step ends in the same bytes."""
    words = [*write_inputs(tmp_path), "--engine", "megatron", "--max_steps", "4", "--save_steps", "2"]
    words += ["--global_batch_size", "8", "--export_hf", "false", "--save_total_limit", "9"]
    sync, background, resumed = (tmp_path / name for name in ("sync", "background", "resumed"))
    late = ("tests.trainers.hooks.test_background_save:go_with_late_writers", background, ["--async_save", "true"])
    for work, out, more in (("tests.trainers.run_ranks:go", sync, []), late):
        shared("").run(work, Job([*words, "--output_dir", str(out), *more]), 2)
    go_on = ["--resume_from_checkpoint", str(background / "checkpoints" / "step-2")]
    shared("").run("tests.trainers.run_ranks:go", Job([*words, "--output_dir", str(resumed), *go_on]), 2)
    for step in ("step-2", "step-4"):
        first = entries(sync / "checkpoints" / step)
        assert len(first) == 5 and first == entries(background / "checkpoints" / step)
        assert not damaged_file_problems(background / "checkpoints" / step)
    assert entries(resumed / "checkpoints" / "step-4") == entries(sync / "checkpoints" / "step-4")


def entries(step: Path) -> dict[str, Any]:
    """The engine's files but the tables, which are pickled, and random states: Python's differ between processes."""
    manifest = load_manifest_or_none(step)
    assert manifest is not None, json.dumps(sorted(p.name for p in step.parent.iterdir()))
    files = manifest["files"].items()
    return {n: e for n, e in files if n.startswith("engine/") and ".metadata" not in n and "/rng-" not in n}
