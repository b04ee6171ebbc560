"""Alibaba Cloud's PAI-DLC, by its command-line client `dlc`. Parameters: "Commands used to submit jobs" of its manual
(September 2024).

No secrets: the client has no references to a store, and PAI keeps a job's command and variables as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from megaswift.clusters.job import RUN_FILE, Job, RenderedJob, SubmittedJob
from megaswift.clusters.shell_lines import preparation_lines, shell_words
from megaswift.errors import ConfigError, Problem

COMMAND = "command.sh"
RUN_PLACE = f"/tmp/megaswift-{RUN_FILE}"
HIGHEST_PRIORITY = 9
MOST_BYTES = 60_000
"""Maximum bytes of the command, which holds the configuration: PAI takes 65,536 bytes for all parameters of a job."""
SIMPLE = {
    "workspace_id": "workspace_id",
    "resource_id": "resource_id",
    "vpc_id": "vpc_id",
    "switch_id": "switch_id",
    "security_group_id": "security_group_id",
    "priority": "priority",
    "worker_spec": "worker_spec",
    "cpus_per_node": "worker_cpu",
    "memory_per_node": "worker_memory",
}
"""Our option and the client's."""


class DlcScheduler:
    """dlc submit, get, logs, stop."""

    shares_files = False
    id_pattern = re.compile(r"dlc[a-z0-9-]{1,60}")

    def problems(self, job: Job) -> list[Problem]:
        """An image; a size by instance type or by resources."""
        where = f"cluster {job.cluster.name}"
        problems = []
        if not job.cluster.get("image"):
            problems.append(Problem(where, "needs an image", "image: REGISTRY/megaswift:cuda"))
        if not job.cluster.get("worker_spec") and not job.cluster.get("resource_id"):
            rule = "needs worker_spec (an instance type) or resource_id (a quota)"
            problems.append(Problem(where, rule, "worker_spec: ecs.gn7e-c16g1.16xlarge"))
        priority = job.cluster.get("priority")
        if priority is not None and priority > HIGHEST_PRIORITY:
            rule = f"must be from 1 to {HIGHEST_PRIORITY}"
            problems.append(Problem(f"{where}: priority: {priority}", rule, f"priority: {HIGHEST_PRIORITY}"))
        if (size := len(_script(job).encode())) > MOST_BYTES:
            rule = f"is {size} bytes with the configuration, and PAI takes about {MOST_BYTES}"
            fix = "move long values of the configuration into a file of a mounted data set"
            problems.append(Problem(f"{where}: the command of the job", rule, fix))
        return problems

    def warnings(self, job: Job) -> list[str]:
        """None."""
        return []

    def render(self, job: Job) -> RenderedJob:
        """`dlc submit pytorchjob`: each node runs the same command, and PAI sets MASTER_ADDR, MASTER_PORT, RANK."""
        script = _script(job)
        words = ["dlc", "submit", "pytorchjob", f"--name={job.name}", f"--workers={job.nodes}"]
        words += [f"--worker_image={job.cluster.get('image')}"]
        if job.gpus_per_node and not job.cluster.get("worker_spec"):
            words.append(f"--worker_gpu={job.gpus_per_node}")
        for ours, theirs in SIMPLE.items():
            if (value := job.cluster.get(ours)) is not None:
                words.append(f"--{theirs}={value}")
        if sources := job.cluster.get("data_sources"):
            words.append(f"--data_sources={','.join(map(str, sources))}")
        command = [*words, f"--command={script}"]
        return RenderedJob({COMMAND: script + "\n"}, [command], "PAI's client and service were not at hand")

    def job_id(self, output: str, job: Job) -> str:
        """dlc prints the id: `dlc1k2x...`, or `dlc-20210126170216-1k2x...`."""
        found = re.search(r"\bdlc(-\d{14}-)?[a-z0-9]{6,}\b", output)
        if found is None:
            raise ConfigError(Problem("dlc submit", f"printed no job id: {output.strip()[:200]}"))
        return found[0]

    def status(self, job: SubmittedJob) -> Sequence[str]:
        """The job's state."""
        return ["dlc", "get", "job", job.id]

    def logs(self, job: SubmittedJob, follow: bool) -> Sequence[str]:
        """Returns the command that prints the first worker's log; the client ends by itself."""
        return ["dlc", "logs", job.id, f"{job.id}-worker-0"]

    def alive(self, job: SubmittedJob) -> None:
        """The client prints what is there."""

    def cancel(self, job: SubmittedJob) -> Sequence[str]:
        """Stops the job; its record stays."""
        return ["dlc", "stop", "job", job.id, "--force"]


def _script(job: Job) -> str:
    lines = [
        f"printf %s {shell_words([job.run_text])} > {RUN_PLACE}",
        f"mkdir -p -- {shell_words([job.workdir])}",
        *preparation_lines(job),
        'export NODE_RANK="$RANK"; unset RANK WORLD_SIZE',
        f"exec {shell_words(job.command(RUN_PLACE))}",
    ]
    return "\n".join(lines)


SCHEDULER = DlcScheduler()
