"""The runs that the board finds, and what it says of them without writing or locking anything."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

import pytest

from megaswift.board.runs import find_runs, is_locked
from megaswift.run.lock import RunLock
from tests.board.test_jobs import running_job, write_job
from tests.run.report.runs import line, write_folder

SCREEN = (
    "2026-11-29 13:53:22 megaswift: supervised fine-tuning\n"
    "2026-11-29 13:53:22   memory      weights 1.5 GiB + gradients 512.0 MiB = 2.0 GiB on the largest rank\n"
)


def test_runs_in_and_below_the_folders_the_newest_first(tmp_path: Path) -> None:
    old = write_folder(tmp_path / "output" / "v0-20261128-000000", [line(1)])
    os.utime(old / "metrics.jsonl", (1, 1))
    write_folder(tmp_path / "output" / "v1-20261129-000000", [line(1)])
    write_folder(tmp_path / "output" / "v1-20261129-000000" / "replaced" / "1", [line(1)])
    (tmp_path / "notes").mkdir()
    names = [run.name for run in find_runs([tmp_path / "output", tmp_path / "output" / "v0-20261128-000000"])]
    assert names == ["v1-20261129-000000", "v0-20261128-000000"], "each once; none that was moved aside"


def test_runs_of_one_name_have_their_paths(tmp_path: Path) -> None:
    folders = [write_folder(tmp_path / part / "run", [line(1)]) for part in "ab"]
    runs = find_runs(folders)
    assert {run.name for run in runs} == {str(folder) for folder in folders}
    assert len({run.key for run in runs}) == 2 and not any("/" in run.key for run in runs)


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    run = write_folder(tmp_path / "run", [line(1)])
    (run / "again").symlink_to(tmp_path)
    assert [found.name for found in find_runs([tmp_path])] == ["run"]


def test_a_run_in_progress_is_known_without_taking_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a shared lock for an instant would refuse a run that starts then."""
    folder = write_folder(tmp_path / "run", [line(1)])
    lock = RunLock(folder)
    run = find_runs([folder])[0]
    assert run.status() == "ended without a report"
    lock.take()
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", lambda *_: pytest.fail("the lock was touched"))
        assert run.status() == "running" and is_locked(lock.path)
    lock.release()
    assert not is_locked(lock.path) and run.status() == "ended without a report"


def test_how_a_run_ended(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "run", [line(1)])
    ends = ["interrupted at step 4 (SIGTERM)", "finished at step 8"]
    told = "".join(f"2026-11-29 13:53:29 megaswift: {end}; report with curves: OUT/report.html\n" for end in ends)
    (folder / "train.log").write_text(told)
    assert find_runs([folder])[0].status() == "finished at step 8"
    (folder / "run.lock").write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": ""}))
    assert find_runs([folder])[0].status() == "running on elsewhere", "its log is fresh"
    long_ago = time.time() - 600
    os.utime(folder / "train.log", (long_ago, long_ago))
    assert find_runs([folder])[0].status() == "finished at step 8"


def test_a_job_is_a_run_from_its_start_on(tmp_path: Path) -> None:
    out = tmp_path / "sft-1"
    with running_job(out) as (process, job):
        (run,) = find_runs([tmp_path])
        assert (run.name, run.status(), run.output()) == ("sft-1", "starting", "")
        process.kill()
    (job / "job.log").write_text("no such library\n")
    assert run.status() == "ended before it began: see the output" and run.output() == "no such library\n"
    (out / "train.log").write_text("2026-11-29 13:53:29 megaswift: finished at step 8; report with curves: OUT\n")
    assert run.status() == "finished at step 8"
    (job / "job.log").unlink()
    (job / "job.log").symlink_to("/etc/passwd")
    assert run.output() == "", "a link may lead elsewhere"


def test_the_jobs_of_versions_are_no_run_of_their_own(tmp_path: Path) -> None:
    write_job(tmp_path / "output", "sft", 1)
    write_folder(tmp_path / "output" / "v0-20261129-170000", [line(1)])
    assert [run.name for run in find_runs([tmp_path])] == ["output/v0-20261129-170000"]


def test_log_memory_and_last_line(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "run", [line(1), line(2)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # as a writer leaves it for a moment
    (folder / "train.log").write_text("x" * 300_000 + "\n" + SCREEN)
    run = find_runs([folder])[0]
    assert run.log() == SCREEN, "its end, from a whole line on"
    assert run.memory_parts() == {"weights": 3 * 2**29, "gradients": 2**29}
    assert run.last_line()["step"] == 2
    empty = write_folder(tmp_path / "empty", [], config="task: sft\n")
    run = find_runs([empty])[0]
    assert (run.log(), run.memory_parts(), run.last_line(), run.config()) == ("", {}, {}, "task: sft\n")


def test_a_hundred_runs_are_read_within_a_second(tmp_path: Path) -> None:
    for number in range(100):
        folder = write_folder(tmp_path / str(number), [line(i) for i in range(1, 51)])
        (folder / "train.log").write_text(SCREEN * 50)
    start = time.process_time()
    told = [(run.status(), run.last_line(), run.memory_parts()) for run in find_runs([tmp_path])]
    assert len(told) == 100 and time.process_time() - start < 1
