"""Hosts that ssh reaches: each gets its part of the run, fed to a shell, and keeps its log in the job's folder.

The folder must be visible on every host under the same path, as the run's output directory must be.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaswift.clusters.job import Cluster, Job, RenderedJob, SubmittedJob
from megaswift.clusters.local_processes import IS_OWN, printed_file
from megaswift.clusters.options import HOST
from megaswift.clusters.shell_lines import HEADER, preparation_lines, shell_words
from megaswift.compat.files.hostfile import read_hostfile
from megaswift.errors import ConfigError, Problem
from megaswift.launchers.options.variables import DEFAULT_PORT

START = "start.sh"
QUIET = ("-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes")
"""A question would wait for ever."""


class SshScheduler:
    """ssh; the hosts' processes are found by the process ids in the job's folder."""

    shares_files = True
    id_pattern = re.compile(f"{HOST.pattern}( {HOST.pattern})*")

    def problems(self, job: Job) -> list[Problem]:
        """Hosts, as many as nodes."""
        given = [name for name in ("hosts", "hostfile") if job.cluster.get(name)]
        if len(given) != 1:
            rule = "needs hosts or hostfile" if not given else "takes hosts or hostfile, not both"
            return [Problem(f"cluster {job.cluster.name}", rule, "hosts: [node1, node2]")]
        hosts = hosts_of(job.cluster)
        unsafe = [host for host in hosts if not HOST.fullmatch(host)]
        if unsafe:
            return [Problem(f"cluster {job.cluster.name}: host {unsafe[0]}", "is not the name of a host")]
        if len(hosts) < job.nodes:
            return [Problem(f"--nodes {job.nodes}", f"cluster {job.cluster.name} has {len(hosts)} hosts")]
        return []

    def warnings(self, job: Job) -> list[str]:
        """None."""
        return []

    def render(self, job: Job) -> RenderedJob:
        """A script for each host, and one that hands them out."""
        hosts = hosts_of(job.cluster)[: job.nodes]
        files = {_node_file(rank): _node_script(job, rank, hosts) for rank in range(len(hosts))}
        files[START] = "\n".join(_start_lines(job, hosts)) + "\n"
        return RenderedJob(files, [["bash", str(job.folder / START)]])

    def job_id(self, output: str, job: Job) -> str:
        """The hosts, in order of their ranks."""
        found = output.strip().splitlines()
        if not found or not found[-1].startswith("started "):
            raise ConfigError(Problem("ssh", f"did not start the job: {output.strip()[-300:]}"))
        return found[-1].removeprefix("started ")

    def status(self, job: SubmittedJob) -> Sequence[str]:
        """A line a host."""
        return _on_every_host(job, f'{IS_OWN} && echo "$h running" || echo "$h ended"')

    def logs(self, job: SubmittedJob, follow: bool) -> Sequence[str]:
        """Returns the command that prints the log of node 0, whose rank 0 prints."""
        return printed_file(Path(job.folder, "node-0.log"), follow)

    def alive(self, job: SubmittedJob) -> Sequence[str]:
        """Looks at the process of node 0."""
        return _on_every_host(replace(job, id=job.id.split(" ")[0]), IS_OWN)

    def cancel(self, job: SubmittedJob) -> Sequence[str]:
        """SIGTERM on every host."""
        return _on_every_host(job, f'{IS_OWN} && kill -TERM "$1" || echo "$h ended"')


def hosts_of(cluster: Cluster) -> list[str]:
    """Returns the hosts in the cluster's list, which may be empty."""
    return [str(host) for host in cluster.get("hosts") or ()]


def with_hosts_of_its_file(cluster: Cluster) -> Cluster:
    """The cluster with the hosts of its `hostfile` (`host slots=8`, comments with #) as its list, where it has a file
    and no list; their slots are its gpus_per_node where it has none. ConfigError where these differ."""
    file = cluster.get("hostfile")
    if not file or cluster.get("hosts"):
        return cluster
    found = read_hostfile(Path(str(file)).expanduser())
    more: dict[str, Any] = {"hostfile": None, "hosts": [host.name for host in found]}
    if cluster.get("gpus_per_node") is None:
        slots = {host.slots for host in found}
        if len(slots) > 1:
            rule = "has hosts with different slots, and a job has as many processes on each node"
            raise ConfigError(Problem(f"cluster {cluster.name}: hostfile {file}", rule, "set gpus_per_node"))
        more["gpus_per_node"] = slots.pop()
    return replace(cluster, options={**cluster.options, **more})


def _node_file(rank: int) -> str:
    return f"node-{rank}.sh"


def _node_script(job: Job, rank: int, hosts: Sequence[str]) -> str:
    port = job.cluster.get("master_port") or DEFAULT_PORT
    address = job.cluster.get("master_addr") or hosts[0].rpartition("@")[2]
    own = [f"export NODE_RANK={rank} MASTER_ADDR={shell_words([str(address)])} MASTER_PORT={port}"]
    command = f"exec {shell_words(job.command(str(job.run_file)))}"
    return "\n".join([HEADER, *preparation_lines(job), *own, command]) + "\n"


def _start_lines(job: Job, hosts: Sequence[str]) -> list[str]:
    options = [*QUIET, *map(str, job.cluster.get("ssh_options") or ())]
    secrets = [str(name) for name in job.cluster.get("secret_variables") or ()]
    lines = [HEADER, "# Secrets go over ssh's input: they are in no file and on no command line.", "set -e"]
    for rank, host in enumerate(hosts):
        script, log, pid = (str(job.folder / f"node-{rank}.{kind}") for kind in ("sh", "log", "pid"))
        remote = [f"setsid bash {shell_words([script])} > {shell_words([log])} 2>&1 < /dev/null &", "echo $! > "]
        remote[1] += shell_words([pid])
        send = [f"printf 'export {name}=%q\\n' \"${{{name}-}}\"" for name in secrets]
        send += [f"printf '%s\\n' {shell_words([line])}" for line in remote]
        lines.append(f"{{ {'; '.join(send)}; }} | {shell_words(['ssh', *options, '--', host, 'bash', '-s'])}")
    return [*lines, f"echo {shell_words(['started ' + ' '.join(hosts)])}"]


def _on_every_host(job: SubmittedJob, line: str) -> Sequence[str]:
    """`line` on each host, where $1 is the process id, $2 the job's folder and $h the host. Paths go in as data. The
    exit code is that of the last host that failed."""
    options = shell_words([*QUIET, *map(str, job.options.get("ssh_options") or ())])
    words = '"$h" "$FOLDER/node-$r.pid" "$FOLDER/node-$r.pid" "$FOLDER/"'
    pid = '"$([ -f %q ] && head -c 20 %q)"'
    send = f"printf 'h=%q; set -- {pid} %q; %s\\n' {words} {shell_words([line])}"
    each = f'{send} | ssh {options} -- "$h" bash -s || code=$?; r=$((r+1))'
    loop = f'set -f; r=0; code=0; for h in $HOSTS; do {each}; done; exit "$code"'
    return ["env", f"HOSTS={job.id}", f"FOLDER={job.folder}", "bash", "-c", loop]


SCHEDULER = SshScheduler()
