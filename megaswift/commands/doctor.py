"""`megaswift doctor`: package versions, and checks of the software, the machine, the network and the other nodes."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

from megaswift.base.byte_size import bytes_text
from megaswift.base.command_words import UserErrorArgumentParser
from megaswift.diagnosis.c_compiler import compiler_findings
from megaswift.diagnosis.compiled_extensions import extension_findings
from megaswift.diagnosis.environment import HarmConditions, variable_findings
from megaswift.diagnosis.finding import Finding, findings_json, summary_line
from megaswift.diagnosis.gpu_devices import gpu_findings, list_gpus
from megaswift.diagnosis.gpu_topology import topology_findings
from megaswift.diagnosis.host_limits import limit_findings
from megaswift.diagnosis.hubs import hub_findings
from megaswift.diagnosis.infiniband import infiniband_findings, list_ports
from megaswift.diagnosis.installed import (
    Software,
    has_module,
    modules_to_import,
    probe_imports,
)
from megaswift.diagnosis.machine import Machine
from megaswift.diagnosis.nodes import NodeAddress, node_findings, parse_nodes
from megaswift.diagnosis.requirements import requirement_findings
from megaswift.diagnosis.reverse_lookups import LOOPBACK, reverse_lookup_finding
from megaswift.diagnosis.smoke_run import smoke_finding
from megaswift.diagnosis.storage import storage_findings
from megaswift.diagnosis.torch_build import torch_findings
from megaswift.engine.options.te import has_transformer_engine
from megaswift.errors import ConfigError, Problem
from megaswift.launchers.local_address import addresses_of_interfaces
from megaswift.rollout.vllm_package import vllm_version_problem
from megaswift.version import __version__

MOST_CPU_PROCESSES = 2
"""Maximum processes of a smoke run without GPUs."""


def main(argv: list[str]) -> int:
    """Prints the report; 1 where there is a problem."""
    given = _parser().parse_args(argv)
    if given.output_dir.exists() and not given.output_dir.is_dir():
        raise ConfigError(Problem(f"--output_dir {given.output_dir}", "is a file", "the folder that a run writes to"))
    nodes = parse_nodes(given.nodes) if given.nodes is not None else []
    machine = Machine(dict(os.environ))
    software = probe_imports(modules_to_import(), machine.environ)
    if not given.json:
        print("\n".join(version_lines(software)), end="\n\n", flush=True)
    findings = []
    for finding in all_findings(machine, software, given, nodes):
        findings.append(finding)
        if not given.json:
            print("\n".join(finding.lines()), flush=True)
    problem = any(finding.state == "problem" for finding in findings)
    if given.json:
        rows = {"megaswift": __version__, "versions": dict(software.versions), "torch": dict(software.torch)}
        print(json.dumps(rows | {"findings": findings_json(findings)}, indent=2))
    else:
        print(f"\n{summary_line(findings)}")
    return int(problem)


def _parser() -> argparse.ArgumentParser:
    text = "Prints package versions and checks this machine for training. Exit code: 0, or 1 where there is a problem."
    parser = UserErrorArgumentParser(prog="megaswift doctor", description=text, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print versions and findings as JSON")
    parser.add_argument("--nodes", metavar="HOST[:PORT],...", help="other nodes: names, reachability, clocks (by ssh)")
    parser.add_argument("--offline", action="store_true", help="contact no hub")
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=Path("output"),
        metavar="DIR",
        help="folder whose free space and writing speed are measured (default: output)",
    )
    parser.add_argument(
        "--smoke", action="store_true", help="also train two steps of a tiny model on all GPUs, or the CPU"
    )
    return parser


def all_findings(
    machine: Machine, software: Software, given: argparse.Namespace, nodes: Sequence[NodeAddress]
) -> Iterator[Finding]:
    """Every check, the slow ones last."""
    listing = list_gpus(machine)
    topology = list(topology_findings(machine))
    gpus = len(software.torch.get("devices", ()))
    processes = gpus or min(MOST_CPU_PROCESSES, os.cpu_count() or 1)
    yield from requirement_findings()
    yield from torch_findings(software, listing)
    yield from extension_findings(software)
    yield from compiler_findings(software, machine.environ)
    yield from gpu_findings(listing, machine)
    yield from topology
    yield from infiniband_findings(machine, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], bool(listing.devices))
    yield from limit_findings(machine, processes)
    facts = HarmConditions(
        gpus=len(listing.devices),
        nvlink=any("NV" in finding.found for finding in topology),
        infiniband=any(port.active for port in list_ports(machine)),
        several_nodes=bool(nodes),
        old_vllm=has_module("vllm") and bool(vllm_version_problem("vLLM", (0, 33), "")),
    )
    yield from variable_findings(machine.environ, facts)
    yield from storage_findings(given.output_dir, machine.environ)
    yield from hub_findings(machine.environ, given.offline)
    yield reverse_lookup_finding("reverse lookups", [LOOPBACK, *addresses_of_interfaces().values()])
    yield from node_findings(nodes, machine)
    if given.smoke:
        yield smoke_finding(processes, machine.environ)


def version_lines(software: Software) -> Iterator[str]:
    """Lines `name  value`: packages, devices, and whose layers a run uses."""
    yield f"{'megaswift':<22}{__version__}"
    yield (
        f"{'python':<22}{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} "
        f"CPU cores"
    )
    for package, version in software.versions.items():
        yield f"{package:<22}{version}"
    if not software.torch:
        yield f"{'devices':<22}unknown without torch"
        return
    for i, device in enumerate(software.torch["devices"]):
        capability = ".".join(map(str, device["capability"]))
        yield f"{f'cuda:{i}':<22}{device['name']}, {bytes_text(device['memory'])}, capability {capability}"
    if software.torch["cuda_available"]:
        yield f"{'CUDA, NCCL':<22}{software.torch['cuda']}, {software.torch['nccl']}"
    else:
        yield f"{'devices':<22}CPU only: runs use gloo"
    layers = "transformer_engine" if software.torch["cuda_available"] and has_transformer_engine() else "torch"
    yield f"{'layers':<22}{layers} (transformer_impl auto)"
