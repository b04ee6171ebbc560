"""Rules for the processes of `megaswift infer`."""

from __future__ import annotations

from collections.abc import Iterator

from megaswift.config.infer_deploy_export_parser import ParsedCommand
from megaswift.config.inference import InferProcessOptions
from megaswift.errors import Problem

OF_NODES = ("node_rank", "master_addr", "master_port")
LAUNCH_OPTIONS = ("nproc_per_node", "nnodes", *OF_NODES)


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
