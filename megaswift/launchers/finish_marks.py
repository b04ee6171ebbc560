"""Marks of processes that came to their end. Code that a run calls (a reward, a library) may end a process with exit
code 0, which looks like success: such a process leaves no mark.

A launcher names a folder in the environment of the processes that it starts on this machine, and looks into it when all
have ended with exit code 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megaswift.config.variables_set_by_launcher import restart_count

FOLDER = "MEGASWIFT_FINISHED"


def mark_finished(environ: Mapping[str, str]) -> None:
    """Leaves the mark of this process, where its launcher wants one."""
    if folder := environ.get(FOLDER):
        Path(folder, f"{restart_count(environ)}-{environ.get('RANK', '0')}").touch()


def unfinished_text(folder: Path, started: int) -> str:
    """The line about processes without a mark, of `started` in the last attempt; empty where all have one."""
    attempts = [int(mark.name.partition("-")[0]) for mark in folder.iterdir()]
    finished = attempts.count(max(attempts, default=0))
    if finished >= started:
        return ""
    count = f"{started - finished} of {started} processes" if started > 1 else "the process"
    return (
        f"megaswift: {count} ended with exit code 0 before the run was finished: code that the run calls, such as a "
        "reward function, may have ended it"
    )
