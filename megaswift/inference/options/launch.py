"""Launch options of `megaswift infer`, `export` and `convert`: their values, of which a variable of the same name goes
over the file and is overridden by the command line, and the rules for the processes of `infer`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megaswift.errors import Problem
from megaswift.inference.options.commands import InferProcessOptions
from megaswift.inference.options.parser import ParsedCommand
from megaswift.options.spelling import TypedOption

OF_NODES = ("node_rank", "master_addr", "master_port")
LAUNCH_OPTIONS = ("nproc_per_node", "nnodes", *OF_NODES)
NUMBERS = ("nproc_per_node", "nnodes", "node_rank", "master_port")


def node_option_values(
    flags: Mapping[str, Any], environ: Mapping[str, str], file: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The launch options: of the command line, else of the variables of the same names, else of the file. Values that
    are no numbers are left out. Variables of a node's rank and address count only where there are several nodes:
    schedulers set them also for one."""
    from_file = _typed(file or {})
    typed = _typed(flags)
    variables = _typed({name: environ.get(name.upper()) for name in LAUNCH_OPTIONS})
    variables = {name: value for name, value in variables.items() if value != 0 or name == "node_rank"}
    if {**from_file, **variables, **typed}.get("nnodes", 1) == 1:
        variables = {name: value for name, value in variables.items() if name not in OF_NODES}
    return {**from_file, **variables, **typed}


def _typed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Launch options with readable values."""
    given = {name: values[name] for name in LAUNCH_OPTIONS if values.get(name) not in (None, "")}
    readable = {name: value for name, value in given.items() if name not in NUMBERS or str(value).isdigit()}
    return {name: int(value) if name in NUMBERS else str(value) for name, value in readable.items()}


def variables_as_typed(values: Mapping[str, Any]) -> dict[str, TypedOption]:
    """Launch options that variables set, for messages: `NODE_RANK=3`."""
    return {n: TypedOption(f"{n.upper()}=", f"{n.upper()}={value}") for n, value in values.items()}


def with_launch_variables(parsed: ParsedCommand, environ: Mapping[str, str]) -> ParsedCommand:
    """The section `launch` with the variables; those that count are named in messages."""
    launch: InferProcessOptions = parsed.sections["launch"]
    given = {name: value for name in LAUNCH_OPTIONS if (value := getattr(launch, name)) is not None}
    flags = {name: value for name, value in given.items() if parsed.typed[name].spelling.startswith("--")}
    values = node_option_values(flags, environ, given)
    changed = {name: value for name, value in values.items() if given.get(name) != value}
    typed = variables_as_typed(changed)
    sections = {**parsed.sections, "launch": replace(launch, **values)}
    return replace(parsed, sections=sections, typed={**parsed.typed, **typed})


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
