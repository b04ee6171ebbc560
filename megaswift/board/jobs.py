"""Runs that the board starts, stops and resumes: jobs of the cluster `local`, by `megaswift submit` and `jobs`.

A job is a process of its own in the background. The board holds nothing of it: which jobs there are stands in the
folders of the runs.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megaswift.base.versions import VERSION
from megaswift.board.form import run_file_text
from megaswift.clusters.job import SubmittedJob
from megaswift.clusters.job_folder import JOBS, RECORD, read_record
from megaswift.clusters.local_processes import LOG
from megaswift.clusters.options import LOCAL
from megaswift.errors import ConfigError, Problem, first_line

TOKEN = "MEGASWIFT_BOARD_TOKEN"
"""The variable with the board's token, which no run needs."""
CHECK_SECONDS = 300
STAMP = len("-20261129-170000")
"""Characters behind the name in a job's id (`Job.id`)."""


def newest_job(folder: Path) -> SubmittedJob | None:
    """Return the job that wrote a run's folder last; None where nobody submitted it."""
    places = [*(folder / JOBS).glob(f"*/{RECORD}")]
    if VERSION.fullmatch(folder.name) and (name := _job_name(folder)):
        places += (folder.parent / JOBS).glob(f"{name}/{RECORD}")
    records = []
    for place in places:
        try:
            records.append(read_record(place.parent))
        except ConfigError:  # somebody else's file of that name
            continue
    return max(records, key=lambda record: record.submitted, default=None)


def _job_name(folder: Path) -> str:
    try:
        return (folder / "job_id").read_text(encoding="utf-8").strip()[:-STAMP].replace("*", "")
    except (OSError, UnicodeDecodeError):
        return ""


def is_alive(job: SubmittedJob | None) -> bool:
    """Return whether the process of a job of this machine runs a file of its folder (a process id is given again)."""
    if job is None or job.launcher != LOCAL:
        return False
    try:
        words = Path("/proc", job.id, "cmdline").read_bytes()
    except OSError:
        return False
    return os.fsencode(f"{job.folder}/") in words


def job_log(job: SubmittedJob) -> Path:
    """Return the file with the output of a job of this machine."""
    return Path(job.folder, LOG)


@dataclass(frozen=True)
class Checked:
    """The result of the checks of a run."""

    problems: Sequence[Problem]
    output_dir: Path | None = None
    """Where the run would write, absolute; None with problems."""
    notices: Sequence[str] = ()


@dataclass(frozen=True)
class Done:
    """The result of a request."""

    text: str = ""
    """What the command said."""
    problems: Sequence[Problem] = ()
    """Why nothing was done."""
    folder: Path | None = None
    """Of the run."""


class Jobs:
    """Starts, stops and resumes runs in and below some folders."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = [root.resolve() for root in roots]
        self._starting = threading.Lock()
        """Two browsers that start the same run at the same time: the second finds the first one's job."""

    def check(self, task: str | None, words: Sequence[str]) -> Checked:
        """Make the checks of a run in a process of their own, and those of the board."""
        request = json.dumps({"task": task, "words": list(words)})
        try:
            done = _run(["-m", "megaswift.board.check"], request, CHECK_SECONDS)
            answer = json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            rule = f"have not ended within {CHECK_SECONDS} s"
            return Checked([Problem("the checks of the run", rule, "check it in a terminal: megaswift config")])
        except (ValueError, IndexError):
            last = first_line(ValueError(done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"))
            return Checked([Problem("the checks of the run", f"have failed: {last}")])
        if answer["problems"]:
            return Checked([Problem(**problem) for problem in answer["problems"]])
        folder = Path(answer["output_dir"]).expanduser().resolve()
        if not any(folder.is_relative_to(root) for root in self.roots):
            rule = "is outside the folders of this board"
            return Checked([Problem(f"--output_dir {answer['output_dir']}", rule, f"a folder in {self.roots[0]}")])
        if is_alive(newest_job(folder)):
            rule = "a job is running in this folder"
            return Checked([Problem(f"--output_dir {answer['output_dir']}", rule, "stop it, or give another folder")])
        return Checked((), folder, answer["notices"])

    def start(self, task: str, words: Sequence[str]) -> Done:
        """Start a run with these options, if its checks find no problem."""
        with self._starting, tempfile.TemporaryDirectory(prefix="megaswift-board-") as place:
            checked = self.check(task, words)
            if checked.output_dir is None:
                return Done(problems=checked.problems)
            file = Path(place, f"{task}.yaml")
            file.write_text(run_file_text(task, words, str(checked.output_dir)), encoding="utf-8")
            return self._submit(file, [], checked.output_dir)

    def resume(self, folder: Path, more: Sequence[str]) -> Done:
        """Continue the run in a folder from its newest checkpoint, with its own configuration and further options."""
        words = resume_words(folder, more)
        with self._starting:
            checked = self.check(None, words)
            if checked.output_dir is None:
                return Done(problems=checked.problems)
            return self._submit(Path(words[0]), [*words[1:], "--name", "resumed"], checked.output_dir)

    def stop(self, folder: Path) -> Done:
        """Ask the run in a folder to save its state and to end."""
        job = newest_job(folder)
        if job is None or not is_alive(job):
            return Done(problems=[Problem(folder.name, "no job of this machine is running here")])
        done = _run(["-m", "megaswift", "jobs", "cancel", job.folder])
        said = (done.stdout + done.stderr).strip()
        if done.returncode:
            return Done(problems=[Problem(folder.name, said or f"exit code {done.returncode}")])
        return Done("The run saves its state after the present step, and ends.", folder=folder)

    def _submit(self, file: Path, words: Sequence[str], folder: Path) -> Done:
        done = _run(["-m", "megaswift", "submit", str(file), "--cluster", LOCAL, *words])
        said = (done.stdout + done.stderr).strip()
        if done.returncode:
            return Done(problems=[Problem("megaswift submit", said or f"exit code {done.returncode}")])
        return Done(said, folder=folder)


def resume_words(folder: Path, more: Sequence[str] = ()) -> list[str]:
    """Return the words of `megaswift train` that continue the run in a folder."""
    own = ["--output_dir", str(folder), "--resume_from_checkpoint", "latest", "--overwrite_output_dir", "false"]
    return [str(folder / "config.yaml"), *own, *more]


def resume_text(folder: Path, more: Sequence[str] = ()) -> str:
    """Return the command line that continues the run in a folder."""
    return shlex.join(["megaswift", "train", *resume_words(folder, more)])


def _run(words: Sequence[str], given: str = "", seconds: float | None = None) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != TOKEN}
    return subprocess.run(
        [sys.executable, *words], input=given, capture_output=True, text=True, check=False, timeout=seconds, env=environ
    )
