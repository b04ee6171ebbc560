"""A job: a run's configuration, its size and the cluster that it goes to; and what is rendered of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaswift.clusters.network_presets import network_variables
from megaswift.clusters.options import options_of_launcher
from megaswift.launchers.options.variables import JOB_ID

RUN_FILE = "run.yaml"
"""The copy of the configuration that the job reads, beside the other files of the job."""
NCCL_OPTIONS = {"nccl_ib_hca": "NCCL_IB_HCA", "nccl_socket_ifname": "NCCL_SOCKET_IFNAME"}
"""Options of a cluster and NCCL's variables, which override those of a preset."""
LONGEST_NAME = 40
"""Characters. KubeRay allows 47 for a RayJob, and Kubernetes 63 for a pod, to whose name operators append a role, a
number and a random part; `next_job_folder` appends a number too."""


@dataclass(frozen=True)
class Cluster:
    """A cluster of clusters.yaml; `options` have passed the checks of `options`."""

    name: str
    launcher: str
    options: Mapping[str, Any] = field(default_factory=dict)
    read: set[str] = field(default_factory=set, compare=False, repr=False)
    """Options that were asked for: a given one that no rendering reads would be ignored."""

    def get(self, option: str) -> Any:
        """The value, or its default."""
        self.read.add(option)
        rows = options_of_launcher(self.launcher)
        return self.options.get(option, rows[option].default if option in rows else None)


@dataclass(frozen=True)
class Role:
    """A part of a run that is Ray actors: sampler engines, or workers of environments."""

    name: str
    actors: int
    cores: int
    """Cores of an actor."""
    gpus: int
    """GPUs of an actor, on one node."""


@dataclass(frozen=True)
class Job:
    """A run with all that its cluster needs, before it is rendered."""

    name: str
    """Lower-case letters, digits and dashes."""
    cluster: Cluster
    run_text: str
    """The configuration file."""
    overrides: tuple[str, ...]
    """Options of the command line, which override the file."""
    nodes: int
    gpus_per_node: int
    processes_per_node: int
    workdir: str
    folder: Path
    """Where the job's files are kept, absolute."""
    python: str
    """The interpreter of this process."""
    roles: tuple[Role, ...] = ()
    """Parts of the run beside its processes, for which a Ray cluster has pods."""
    id: str = ""
    """Identifies this submission; a run that the cluster restarts recognizes its own job by it."""

    @property
    def run_file(self) -> Path:
        """The copy of the configuration."""
        return self.folder / RUN_FILE

    def command(self, run_file: str) -> list[str]:
        """The words that start a node's part of the run."""
        python = self.cluster.get("python")
        program = [python or self.python, "-m", "megaswift"]
        if python is None and (self.cluster.get("image") or self.cluster.get("container_image")):
            program = ["megaswift"]
        return [*program, "train", run_file, *self.overrides]

    def environment(self) -> dict[str, str]:
        """Variables that are the same on every node."""
        given = {str(k): _variable_text(v) for k, v in (self.cluster.get("environment") or {}).items()}
        sizes = {"NNODES": str(self.nodes), "NPROC_PER_NODE": str(self.processes_per_node)}
        job = {JOB_ID: self.id} if self.id else {}
        devices = {name: self.cluster.get(option) for option, name in NCCL_OPTIONS.items()}
        chosen = {name: str(value) for name, value in devices.items() if value is not None}
        return {**network_variables(self.cluster.get("network")), **chosen, **given, **sizes, **job}


@dataclass(frozen=True)
class RenderedJob:
    """The files of a job and how it is submitted."""

    files: Mapping[str, str]
    """Name in the job's folder to content."""
    commands: Sequence[Sequence[str]]
    """Run in order, without a shell. The last one prints the job's id."""
    not_run: str = ""
    """Why this way of submitting is not proven, where it is not."""


@dataclass(frozen=True)
class SubmittedJob:
    """The record of a submitted job in job.json, for `megaswift jobs`."""

    name: str
    cluster: str
    launcher: str
    id: str
    folder: str
    submitted: str
    """When, in UTC."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The cluster's options that its tool needs to find the job."""


def job_name(text: str) -> str:
    """A name that every scheduler takes: lower-case letters, digits and single dashes, a letter first."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:LONGEST_NAME].strip("-")
    return name if name[:1].isalpha() else f"job-{name}".strip("-")


def _variable_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
