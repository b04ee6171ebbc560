"""This machine: the run in the background, its output in the job's folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from megaswift.clusters.job import Job, RenderedJob, SubmittedJob
from megaswift.clusters.shell_lines import HEADER, preparation_lines, shell_words
from megaswift.errors import ConfigError, Problem

IS_OWN = '[[ "$1" =~ ^[0-9]+$ ]] && ps -ww -o args= -p "$1" | grep -qF -- "$2"'
"""Whether process $1 runs a file of the folder $2: a process id is given again after the end of its process."""
ENDED = '{ echo "process $1 of the job has ended"; exit 1; }'
SCRIPT = "job.sh"
START = "start.sh"
LOG = "job.log"


class LocalScheduler:
    """bash, and signals to its process group."""

    shares_files = True
    id_pattern = re.compile(r"[1-9][0-9]{0,9}")

    def problems(self, job: Job) -> list[Problem]:
        """One node."""
        if job.nodes == 1:
            return []
        return [Problem(f"--nodes {job.nodes}", "a local job has one node", "--cluster with launcher ssh or slurm")]

    def warnings(self, job: Job) -> list[str]:
        """None."""
        return []

    def render(self, job: Job) -> RenderedJob:
        """The run's script, and one that starts it in a session of its own and prints the process id."""
        variables = ["export NODE_RANK=0"]
        if port := job.cluster.get("master_port"):
            variables.append(f"export MASTER_PORT={port}")
        run = [HEADER, *preparation_lines(job), *variables, f"exec {shell_words(job.command(str(job.run_file)))}"]
        log = shell_words([str(job.folder / LOG)])
        script = shell_words([str(job.folder / SCRIPT)])
        start = [HEADER, f"setsid bash {script} > {log} 2>&1 < /dev/null &", 'echo "$!"']
        files = {SCRIPT: "\n".join(run) + "\n", START: "\n".join(start) + "\n"}
        return RenderedJob(files, [["bash", str(job.folder / START)]])

    def job_id(self, output: str, job: Job) -> str:
        """The process id, which is also its group's."""
        if not output.strip().isdigit():
            raise ConfigError(Problem("start of the job", f"printed no process id: {output.strip()[:200]}"))
        return output.strip()

    def status(self, job: SubmittedJob) -> Sequence[str]:
        """ps' line; exit code 1 where the process has ended."""
        return _of_its_process(job, f'{IS_OWN} && ps -o pid,stat,etime,args -p "$1" || {ENDED}')

    def logs(self, job: SubmittedJob, follow: bool) -> Sequence[str]:
        """The log file."""
        return printed_file(Path(job.folder, LOG), follow)

    def alive(self, job: SubmittedJob) -> Sequence[str]:
        """Looks at the process."""
        return _of_its_process(job, IS_OWN)

    def cancel(self, job: SubmittedJob) -> Sequence[str]:
        """SIGTERM: the run saves its state."""
        return _of_its_process(job, f'{IS_OWN} && kill -TERM "$1" || {ENDED}')


def printed_file(file: Path, follow: bool) -> list[str]:
    """The command that prints a log file. ConfigError for a pipe or device, which would never end, and for a link,
    which may lead out of the job's folder."""
    if file.is_symlink() or (file.exists() and not file.is_file()):
        raise ConfigError(Problem(str(file), "is not a file", "remove it, or give the folder of another job"))
    return ["tail", *(["-F"] if follow else []), "-n", "+1", "--", str(file)]


def _of_its_process(job: SubmittedJob, line: str) -> list[str]:
    return ["bash", "-c", line, "jobs", job.id, f"{job.folder}/"]


SCHEDULER = LocalScheduler()
