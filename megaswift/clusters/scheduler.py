"""The protocol of schedulers: an object `SCHEDULER` in the module that `table.py` names."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Protocol, cast

from megaswift.clusters.job import Job, RenderedJob, SubmittedJob
from megaswift.clusters.table import SCHEDULERS
from megaswift.errors import Problem

HAS_ENDED = 1
"""Exit code of `alive` for a job that prints nothing more. With any other one, as of ssh that does not get through, it
may still print."""


class Scheduler(Protocol):
    """Renders jobs, and knows the cluster's own tool."""

    shares_files: bool
    """Whether nodes see the files of this machine under the same paths."""
    id_pattern: re.Pattern[str]
    """The form of the ids of its jobs, which appear on the command lines of its tool."""

    def problems(self, job: Job) -> list[Problem]:
        """Options that are missing or do not go together."""

    def warnings(self, job: Job) -> list[str]:
        """Lines about a job that is no mistake, and that may not do what is wanted."""

    def render(self, job: Job) -> RenderedJob:
        """Pure: reads no file and starts nothing."""

    def job_id(self, output: str, job: Job) -> str:
        """From what the last command of `RenderedJob` printed."""

    def status(self, job: SubmittedJob) -> Sequence[str]:
        """The command of the cluster's tool."""

    def logs(self, job: SubmittedJob, follow: bool) -> Sequence[str]:
        """The command that prints what the job has printed."""

    def alive(self, job: SubmittedJob) -> Sequence[str] | None:
        """Returns a command that exits with `HAS_ENDED` once the job has ended. None: `logs` ends by itself."""

    def cancel(self, job: SubmittedJob) -> Sequence[str]:
        """The command that ends the job; the run saves its state first where the cluster gives it time."""


def scheduler_of(launcher: str) -> Scheduler:
    """The scheduler of a launcher; its module is imported now."""
    return cast(Scheduler, importlib.import_module(SCHEDULERS[launcher]).SCHEDULER)
