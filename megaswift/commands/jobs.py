"""`megaswift jobs`: status, output and end of submitted jobs, by the cluster's own tool."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaswift import log
from megaswift.base.command_words import UserErrorArgumentParser
from megaswift.clusters.clusters_file import read_cluster
from megaswift.clusters.job import SubmittedJob
from megaswift.clusters.job_folder import submitted_jobs
from megaswift.clusters.options import SSH
from megaswift.clusters.scheduler import HAS_ENDED, scheduler_of
from megaswift.errors import ConfigError, Problem, UserError

USAGE = """\
Asks the cluster's own tool about jobs that `megaswift submit` has submitted. FOLDER is a job's folder, a run's output
directory, or a folder of them. The exit code is the tool's."""
VERBS = {
    "list": "the jobs of a folder",
    "status": "the tool's status",
    "logs": "what the job prints",
    "cancel": "ends the job",
}

BETWEEN_LOOKS_S = 3.0
"""`logs --follow`: seconds between two looks at whether the job has ended."""
LAST_LINES_S = 2.0
"""Seconds for the job's last lines: tail looks for them every second where the file system has no events."""


def main(argv: Sequence[str]) -> int:
    """The command; returns the exit code."""
    parser = UserErrorArgumentParser(prog="megaswift jobs", description=USAGE, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("verb", choices=tuple(VERBS), help="; ".join(f"{verb}: {text}" for verb, text in VERBS.items()))
    parser.add_argument("folder", nargs="?", default="output", metavar="FOLDER", help="default: output")
    parser.add_argument("--clusters", metavar="FILE", help="the file with the clusters: for ssh_options")
    parser.add_argument("--follow", "-f", action="store_true", help="logs: print more as it comes, until the job ends")
    given = parser.parse_args(list(argv))
    if given.follow and given.verb != "logs":
        rule = f"has no effect on megaswift jobs {given.verb}"
        raise ConfigError(Problem("--follow", rule, "leave it out, or use megaswift jobs logs"))
    jobs, damaged = submitted_jobs(Path(given.folder))
    if damaged and (not jobs or given.verb == "cancel"):
        fix = "give the folder of one job" if jobs else "restore the file, or remove its folder"
        raise ConfigError([replace(problem, fix=fix) for problem in damaged])
    for problem in damaged:
        log.warn(f"{problem.what}: {problem.rule}")
    if not jobs:
        rule = "has no submitted jobs"
        raise ConfigError(Problem(given.folder, rule, "give the output directory of a run that was submitted"))
    if given.verb == "list":
        for job in jobs:
            log.print_result(f"{job.submitted}  {job.cluster}  {job.id}  {job.folder}")
        return 0
    if len(jobs) > 1 and given.verb == "cancel":
        folders = ", ".join(job.folder for job in jobs)
        raise ConfigError(Problem(given.folder, f"has several jobs: {folders}", "give the folder of one job"))
    job = jobs[0]
    if job.launcher == SSH:
        job = replace(job, options=_ssh_options(job, given.clusters))
    return _run(job, given)


def _ssh_options(job: SubmittedJob, clusters: str | None) -> dict[str, Any]:
    """Returns the ssh options of the cluster as clusters.yaml has it now: the record in the job's folder may come from
    someone else."""
    try:
        cluster = read_cluster(job.cluster, clusters)
    except ConfigError as error:
        log.warn(f"ssh gets no ssh_options: {error.problems[0].what}: {error.problems[0].rule}")
        return {}
    return {"ssh_options": cluster.get("ssh_options") or []}


def _run(job: SubmittedJob, given: argparse.Namespace) -> int:
    scheduler = scheduler_of(job.launcher)
    words = {
        "status": lambda: scheduler.status(job),
        "logs": lambda: scheduler.logs(job, given.follow),
        "cancel": lambda: scheduler.cancel(job),
    }[given.verb]()
    if shutil.which(words[0]) is None:
        raise UserError(Problem(words[0], "is not on this machine", "run this where the job was submitted"))
    if given.follow and words == scheduler.logs(job, False):
        log.warn(f"{words[0]} cannot wait for more output: it prints what is there")
    alive = scheduler.alive(job) if given.follow else None
    try:
        if alive is None:
            return subprocess.run(list(words), check=False).returncode
        if _has_ended(alive):
            return subprocess.run(list(scheduler.logs(job, False)), check=False).returncode
        return _follow(words, alive)
    except KeyboardInterrupt:  # logs --follow
        return 0


def _has_ended(alive: Sequence[str]) -> bool:
    quiet = subprocess.DEVNULL
    return subprocess.run(list(alive), stdin=quiet, stdout=quiet, stderr=quiet, check=False).returncode == HAS_ENDED


def _follow(words: Sequence[str], alive: Sequence[str]) -> int:
    """Runs a command that does not end by itself until the job has ended."""
    with subprocess.Popen(list(words)) as printing:
        try:
            while not _has_ended(alive):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return printing.wait(BETWEEN_LOOKS_S)
            with contextlib.suppress(subprocess.TimeoutExpired):
                printing.wait(LAST_LINES_S)
        finally:
            printing.terminate()
    log.info("the job has ended")
    return 0
