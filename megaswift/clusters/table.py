"""Every value of `launcher:` in clusters.yaml: the module that renders and submits jobs there.

Each module has an object `SCHEDULER` (`megaswift.clusters.scheduler`).
"""

from __future__ import annotations

from megaswift.clusters.options import DLC, KUBERNETES, LOCAL, RAY, SLURM, SSH

SCHEDULERS: dict[str, str] = {
    LOCAL: "megaswift.clusters.local_processes",
    SLURM: "megaswift.clusters.slurm",
    KUBERNETES: "megaswift.clusters.kubernetes",
    RAY: "megaswift.clusters.ray_jobs",
    DLC: "megaswift.clusters.pai_dlc",
    SSH: "megaswift.clusters.ssh_hosts",
}
