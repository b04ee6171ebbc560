"""Rules for the processes of `megaswift infer`, and for commands that are one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megaswift.config.cluster_environment import cluster_variables
from megaswift.config.infer_deploy_export_parser import ParsedCommand
from megaswift.config.inference import InferProcessOptions
from megaswift.config.launcher_environment import is_launched_worker
from megaswift.errors import Problem

OF_NODES = ("node_rank", "master_addr", "master_port")
LAUNCH_OPTIONS = ("nproc_per_node", "nnodes", *OF_NODES)
ONE_PROCESS = "one process converts, tensor by tensor, and needs one node"


def infer_launch_problems(parsed: ParsedCommand, has_rows: bool) -> Iterator[Problem]:
    """Nodes without a rank or an address, and processes without rows to divide."""
    launch: InferProcessOptions = parsed.sections["launch"]
    nodes = launch.nnodes or 1
    if not has_rows:
        for name in ("nproc_per_node", "nnodes"):
            if (count := getattr(launch, name) or 1) > 1:
                rule = "divides the rows of a prompt file; a conversation in the terminal has one process"
                yield Problem(_label(parsed, name, count), rule, "--dataset FILE.jsonl, or leave it out")
        return
    if nodes == 1:
        for name in OF_NODES:
            if parsed.given(name):
                yield Problem(parsed.label(name), "applies only to several nodes", "--nnodes 2, or leave it out")
        return
    if launch.node_rank is None:
        yield Problem(_label(parsed, "nnodes", nodes), "needs the rank of this node", "--node_rank 0 (or NODE_RANK)")
    elif launch.node_rank >= nodes:
        yield Problem(
            _label(parsed, "node_rank", launch.node_rank), f"must be less than nnodes ({nodes})", "--node_rank 0"
        )
    if launch.master_addr is None:
        fix = "--master_addr HOST (or MASTER_ADDR)"
        yield Problem(_label(parsed, "nnodes", nodes), "needs the address of node 0", fix)


def _label(parsed: ParsedCommand, name: str, value: int) -> str:
    return parsed.label(name) if parsed.given(name) else f"{name.upper()}={value}"


def several_processes_problems(command: str, environ: Mapping[str, str]) -> list[Problem]:
    """Of a command that writes a folder as one process: a launcher or a scheduler has started it more than once, and
    all of them would write that folder at the same time. The first process is refused, too: the others end the run."""
    found = cluster_variables(environ)
    seen = {**environ, **(found.variables if found else {})}
    world = int(seen["WORLD_SIZE"]) if is_launched_worker(seen) else 1
    if world > 1:
        rule = f"was started as {world} processes by {found.source if found else 'a launcher'}; {ONE_PROCESS}"
        return [Problem(f"megaswift {command}", rule, f"start megaswift {command} once, without the launcher")]
    rank = seen.get("NODE_RANK", "0")
    if rank.isdigit() and int(rank) > 0 and seen.get("NNODES", "1") != "1":
        rule = (
            f"was started on node {rank} of {seen['NNODES']} ({found.source if found else 'NODE_RANK'}); {ONE_PROCESS}"
        )
        fix = f'start it on node 0 only: [ "$NODE_RANK" != 0 ] || megaswift {command} ...'
        if found:
            one = "srun --nodes 1 --ntasks 1 " if found.source.startswith("Slurm") else ""
            fix = f"start it on one node only: {one}megaswift {command} ..."
        return [Problem(f"megaswift {command}", rule, fix)]
    return []
