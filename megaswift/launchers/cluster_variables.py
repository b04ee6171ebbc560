"""A process of a cluster's job takes its place among nodes or ranks from the cluster's own variables."""

from __future__ import annotations

from collections.abc import MutableMapping

from megaswift import log
from megaswift.launchers.cluster_environment import cluster_variables


def take_cluster_variables(environ: MutableMapping[str, str]) -> None:
    """Sets NNODES, NODE_RANK, ... by what the cluster says, where they are not set; the first process says so."""
    if (found := cluster_variables(environ)) is None:
        return
    environ.update(found.variables)
    if int(environ.get("RANK", environ.get("NODE_RANK", "0"))) == 0:
        log.info(f"nodes and ranks are those of {found.source}; NNODES, NODE_RANK and MASTER_ADDR override them")
