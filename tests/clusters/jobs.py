"""Jobs for the tests of rendering."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megaswift.clusters.job import Cluster, Job

NEEDED: dict[str, dict[str, Any]] = {
    "local": {},
    "slurm": {"partition": "gpu"},
    "kubernetes": {"image": "registry/megaswift:cuda"},
    "ray": {"address": "http://127.0.0.1:8265"},
    "dlc": {"image": "registry/megaswift:cuda", "worker_spec": "ecs.gn7e"},
    "ssh": {"hosts": ["node0", "node1"]},
}
"""Options without which a cluster of a launcher is refused."""


def job(launcher: str, nodes: int = 2, gpus: int = 8, folder: Path = Path("/out/jobs/run"), **options: Any) -> Job:
    """A job of two nodes with eight GPUs each, unless said otherwise."""
    more = {name: options.pop(name) for name in ("run_text", "overrides", "workdir", "roles") if name in options}
    text, overrides, workdir = (
        more.get("run_text", "task: sft\n"),
        more.get("overrides", ()),
        more.get("workdir", "/work"),
    )
    cluster = Cluster("lab", launcher, {**NEEDED[launcher], **options})
    sizes = (nodes, gpus, gpus or 1)
    roles = tuple(more.get("roles", ()))
    return Job("run", cluster, text, tuple(overrides), *sizes, workdir, folder, "/env/bin/python", roles)
