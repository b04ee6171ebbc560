"""One run for each output folder: the second is refused and says who has it; the lock ends with its holder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megaswift.config import SwiftConfig, load_config
from megaswift.errors import CheckpointError
from megaswift.run import output
from megaswift.run.lock import NAME, RunLock


def test_a_second_run_is_refused_and_the_first_named(tmp_path: Path) -> None:
    first = RunLock(tmp_path)
    first.take()
    with pytest.raises(CheckpointError, match=f"process {os.getpid()} on {socket.gethostname()}, started 20"):
        RunLock(tmp_path).take()
    (problem,) = output.output_folder_problems(load_config("sft", ["--output_dir", str(tmp_path)], environ={}))
    assert "a run is writing to this folder" in problem.rule
    first.release()
    assert RunLock(tmp_path).problems() == []
    RunLock(tmp_path).take()


def test_nothing_is_locked_or_made_by_a_look(tmp_path: Path) -> None:
    assert RunLock(tmp_path).problems() == [] and not (tmp_path / NAME).exists()


@pytest.mark.process
def test_the_lock_ends_with_a_killed_holder(tmp_path: Path) -> None:
    hold = (
        "import time; from pathlib import Path; from megaswift.run.lock import RunLock; "
        f"lock = RunLock(Path({str(tmp_path)!r})); lock.take(); print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    (problem,) = RunLock(tmp_path).problems()
    assert f"process {holder.pid} " in problem.rule
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    lock = RunLock(tmp_path)
    lock.take()
    lock.release()


def test_a_folder_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    RunLock(tmp_path).take()
    assert "cannot be locked (No locks available)" in capsys.readouterr().err
    assert RunLock(tmp_path).problems() == []


@pytest.mark.parametrize("kind", ["file", "nothing", "folder"])
def test_a_link_in_place_of_the_lock_is_refused(kind: str, tmp_path: Path) -> None:
    victim, out = tmp_path / "victim", tmp_path / "out"
    out.mkdir()
    if kind == "folder":
        victim.mkdir()
    elif kind == "file":
        victim.write_text("precious")
    (out / NAME).symlink_to(victim)
    for look in (lambda: RunLock(out).take(), lambda: output.prepare_output_folder(config(out), RunLock(out))):
        with pytest.raises(CheckpointError, match=r"run\.lock: is a symbolic link.*\n.*remove it"):
            look()
    (problem,) = RunLock(out).problems()
    assert "is a symbolic link" in problem.rule
    assert victim.read_text() == "precious" if kind == "file" else victim.exists() == (kind == "folder")


def config(out: Path) -> SwiftConfig:
    return load_config("sft", ["--output_dir", str(out)], environ={})


def test_a_pipe_or_folder_in_place_of_the_lock_is_refused(tmp_path: Path) -> None:
    for name, make in (("pipe", os.mkfifo), ("folder", os.mkdir)):
        (tmp_path / name).mkdir()
        make(tmp_path / name / NAME)
        with pytest.raises(CheckpointError, match="is not a regular file"):
            RunLock(tmp_path / name).take()


def test_a_forked_child_does_not_hold_the_lock(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    lock.take()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(write)
        os.read(read, 1)  # until the parent is done
        os._exit(0)
    try:
        lock.release()
        assert RunLock(tmp_path).problems() == []
        RunLock(tmp_path).take()
    finally:
        os.close(write)
        os.waitpid(child, 0)
