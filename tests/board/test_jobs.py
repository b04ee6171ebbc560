"""What the board starts, stops and resumes, and what it refuses; the checks of a run.

Covers: megaswift/board/check.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megaswift.board import jobs as board_jobs
from megaswift.board.check import checked
from megaswift.board.jobs import Jobs, is_alive, newest_job, resume_text, resume_words
from megaswift.clusters.job_folder import read_record
from tests.trainers.inputs import write_inputs

STAMP = "20261129-170000"


def write_job(out: Path, name: str, pid: int, submitted: str = "2026-11-29T17:00:00+00:00") -> Path:
    """The folder of a job of this machine."""
    folder = out / "jobs" / name
    folder.mkdir(parents=True)
    record = {"name": name, "cluster": "local", "launcher": "local", "id": str(pid), "folder": str(folder)}
    (folder / "job.json").write_text(json.dumps({**record, "submitted": submitted, "options": {}}))
    return folder


@contextmanager
def running_job(out: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that runs a file of a job's folder, for as long as the block; the process and the folder."""
    program = [sys.executable, "-c", "print(flush=True); input()", str(out / "jobs" / "sft" / "run.yaml")]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()  # right after its start it has no command line yet
        yield process, write_job(out, "sft", process.pid)


class Commands:
    """Stands for the programs that the board runs; notes their words and the files in them."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer
        self.asked: Any = None
        self.words: list[list[str]] = []
        self.file = ""
        self.code = 0

    def __call__(
        self, words: Sequence[str], given: str = "", seconds: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Answer."""
        if words[1] == "megaswift.board.check":
            self.asked = json.loads(given)
            return subprocess.CompletedProcess([], 0, f"noise\n{json.dumps(self.answer)}\n", "")
        self.words.append([*words])
        if words[2] == "submit":
            self.file = Path(words[3]).read_text()
        return subprocess.CompletedProcess([], self.code, "", "said\n")


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    found = Commands({"problems": [], "output_dir": str(tmp_path / "runs" / "a"), "notices": []})
    monkeypatch.setattr(board_jobs, "_run", found)
    return found


def test_a_run_starts_by_submit_with_a_file_of_its_options(tmp_path: Path, commands: Commands) -> None:
    done = Jobs([tmp_path / "runs"]).start("sft", ["--model", "m", "--output_dir", "runs/a"])
    assert done.problems == () and done.folder == tmp_path / "runs" / "a" and done.text == "said"
    assert commands.asked == {"task": "sft", "words": ["--model", "m", "--output_dir", "runs/a"]}
    (words,) = commands.words
    assert words[:3] == ["-m", "megaswift", "submit"] and words[4:] == ["--cluster", "local"]
    assert Path(words[3]).name == "sft.yaml" and not Path(words[3]).exists()
    assert commands.file == f"task: sft\nmodel: m\noutput_dir: {tmp_path / 'runs' / 'a'}\n"


@pytest.mark.parametrize("place", ["elsewhere", "runs/../elsewhere", "link/a"])
def test_nothing_starts_outside_the_folders_of_the_board(place: str, tmp_path: Path, commands: Commands) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    commands.answer["output_dir"] = str(tmp_path / place)
    done = Jobs([tmp_path / "runs"]).start("sft", [])
    assert done.folder is None and "outside the folders of this board" in done.problems[0].rule
    assert commands.words == []


def test_nothing_starts_with_a_problem(tmp_path: Path, commands: Commands) -> None:
    board = Jobs([tmp_path])
    commands.answer = {"problems": [{"what": "--lr x", "rule": "must be a number", "fix": "--lr 1e-5"}]}
    assert [str(p) for p in board.start("sft", []).problems] == ["--lr x: must be a number\n    try: --lr 1e-5"]
    assert commands.words == []


def test_a_check_that_crashes_or_does_not_end_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = Jobs([tmp_path])
    crash = subprocess.CompletedProcess([], 1, "", "Traceback\nImportError: no such library")
    monkeypatch.setattr(board_jobs, "_run", lambda *_: crash)
    assert "ImportError: no such library" in board.start("sft", []).problems[0].rule

    def endless(*_: Any) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired("check", 300)

    monkeypatch.setattr(board_jobs, "_run", endless)
    assert "within 300 s" in board.start("sft", []).problems[0].rule


def test_what_submit_says_of_a_failure_is_the_problem(tmp_path: Path, commands: Commands) -> None:
    commands.code = 2
    done = Jobs([tmp_path]).start("sft", [])
    assert done.folder is None and [str(p) for p in done.problems] == ["megaswift submit: said"]


def test_a_job_that_is_running_is_stopped_and_no_second_one_starts(tmp_path: Path, commands: Commands) -> None:
    """Also before the run has the lock of its folder."""
    out = tmp_path / "runs" / "a"
    board = Jobs([tmp_path])
    with running_job(out) as (process, folder):
        assert is_alive(newest_job(out))
        assert "a job is running in this folder" in board.start("sft", []).problems[0].rule
        assert commands.words == []
        done = board.stop(out)
        assert done.folder == out and "saves its state" in done.text
        assert commands.words == [["-m", "megaswift", "jobs", "cancel", str(folder)]]
        process.kill()
    assert not is_alive(newest_job(out))
    assert "no job of this machine" in board.stop(out).problems[0].rule


def test_a_process_that_has_got_the_id_of_a_job_is_not_its_process(tmp_path: Path) -> None:
    write_job(tmp_path, "sft", 1)
    assert newest_job(tmp_path) is not None and not is_alive(newest_job(tmp_path))
    assert not is_alive(None)


def test_the_job_of_a_run_is_its_newest_that_can_be_read(tmp_path: Path) -> None:
    assert newest_job(tmp_path) is None
    write_job(tmp_path, "sft", 10)
    newest = write_job(tmp_path, "resumed", 11, "2026-11-29T18:00:00+00:00")
    broken = write_job(tmp_path, "other", 12, "2026-11-29T19:00:00+00:00")
    (broken / "job.json").write_text('{"id": "; rm -rf /"}')
    assert newest_job(tmp_path) == read_record(newest)


def test_the_job_of_a_version_is_the_one_that_wrote_it(tmp_path: Path) -> None:
    first = write_job(tmp_path, "sft", 10)
    write_job(tmp_path, "sft-2", 11, "2026-11-29T18:00:00+00:00")
    version = tmp_path / "v0-20261129-170000"
    version.mkdir()
    assert newest_job(version) is None
    (version / "job_id").write_text(f"sft-{STAMP}\n")
    assert newest_job(version) == read_record(first)
    (version / "job_id").write_text(f"../../sft-{STAMP}\n")
    assert newest_job(version) is None or "jobs" in Path(str(newest_job(version))).parts


def test_a_run_is_resumed_with_its_own_configuration(tmp_path: Path, commands: Commands) -> None:
    out = tmp_path / "runs" / "a"
    out.mkdir(parents=True)
    (out / "config.yaml").write_text("task: sft\n")
    done = Jobs([tmp_path]).resume(out, ["--max_steps", "20"])
    assert done.folder == out
    assert commands.asked == {"task": None, "words": resume_words(out, ["--max_steps", "20"])}
    (words,) = commands.words
    own = ["--output_dir", str(out), "--resume_from_checkpoint", "latest", "--overwrite_output_dir", "false"]
    assert words[2:6] == ["submit", str(out / "config.yaml"), "--cluster", "local"]
    assert words[6:] == [*own, "--max_steps", "20", "--name", "resumed"]
    assert resume_text(out).startswith(f"megaswift train {out}/config.yaml --output_dir {out} --resume_from_checkpoint")


def test_the_checks_of_a_run_find_what_the_run_would(tmp_path: Path) -> None:
    inputs = [*write_inputs(tmp_path), "--output_dir", str(tmp_path / "out")]
    assert checked("sft", inputs) == {"problems": [], "output_dir": str(tmp_path / "out"), "notices": []}
    wrong = checked("sft", [*inputs, "--max_steps", "many", "--warmup_ratio", "3"])["problems"]
    assert [problem["what"] for problem in wrong] == ["--max_steps many", "--warmup_ratio 3"]
    later = checked("sft", [*inputs, "--tp", "2", "--val_dataset", "none.jsonl"])["problems"]
    assert {problem["what"].partition(" ")[0] for problem in later} == {"--tp", "--val_dataset"}, "layout and files"
    assert not (tmp_path / "out").exists()


def test_no_child_has_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(board_jobs.TOKEN, "secret")
    done = board_jobs._run(
        ["-c", "import os, sys; print(os.environ.get('MEGASWIFT_BOARD_TOKEN'), sys.stdin.read())"], "in"
    )
    assert done.stdout.split() == ["None", "in"]
