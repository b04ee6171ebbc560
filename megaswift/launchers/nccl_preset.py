"""`--nccl_preset`: NCCL's variables for a kind of network, in a process of a run before it joins a process group.

Owns the choice by the node's devices (`auto`), and that a variable of the user's stays. The variables themselves, with
their reasons: `clusters/network_presets.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from megaswift.clusters.network_presets import network_variables
from megaswift.config.facts.launch_variables import nproc_or_nnodes_started_by_launcher
from megaswift.diagnosis.gpu_devices import LIMIT_S
from megaswift.diagnosis.gpu_topology import parse_topology
from megaswift.diagnosis.infiniband import list_ports
from megaswift.diagnosis.machine import Machine
from megaswift.errors import ConfigError, Problem

NONE = "none"
AUTO = "auto"
ONE_NODE = "nvlink_node"
OPTION = "--nccl_preset"


def apply_nccl_preset(preset: str, environ: MutableMapping[str, str], gpu: bool, machine: Machine | None = None) -> str:
    """Sets the preset's variables that are not set; returns the line for the user.

    `gpu`: whether this run communicates through NCCL.

    Raises:
        ConfigError: the preset is not for this number of nodes.
    """
    nodes = node_count(environ)
    if preset == ONE_NODE and nodes > 1:
        rule = f"is for a single node, and the launcher started {nodes}"
        fix = f"{OPTION} auto"
        raise ConfigError(Problem(f"{OPTION} {preset}", rule, fix))
    if not gpu:
        return f"{OPTION} {preset} has no effect: without a GPU, processes do not communicate through NCCL"
    if int(environ.get("WORLD_SIZE", "1")) == 1:
        return f"{OPTION} {preset} has no effect: the run is one process"
    why = ""
    if preset == AUTO:
        found, why = preset_by_devices(machine or Machine(dict(environ)), nodes)
        if found is None:
            return f"{OPTION} auto: {why}; nothing is set, NCCL chooses"
        preset = found
        why = f" (auto: {why})"
    wanted = network_variables(preset)
    own = {name: environ[name] for name in wanted if name in environ}
    made = {name: value for name, value in wanted.items() if name not in environ}
    environ.update(made)
    kept = f"; set before and kept: {_text(own)}" if own else ""
    return f"{OPTION} {preset}{why}: {_text(made) or 'nothing to set'}{kept}"


def node_count(environ: Mapping[str, str]) -> int:
    """Returns the number of nodes of the run whose worker this process is; 1 for a process on its own."""
    given = nproc_or_nnodes_started_by_launcher("nnodes", environ)
    if given is not None:
        return given
    world = int(environ.get("WORLD_SIZE", "1"))
    local = int(environ.get("LOCAL_WORLD_SIZE", "0"))
    return -(-world // local) if local else 1


def preset_by_devices(machine: Machine, nodes: int) -> tuple[str | None, str]:
    """(preset, the devices that it is for); None where no preset is for them."""
    if nodes == 1:
        done = machine.program(["nvidia-smi", "topo", "-m"], LIMIT_S)
        pairs = parse_topology(done.text) if done is not None and not done.code else {}
        links = {link for names, link in pairs.items() if all(n.startswith("GPU") for n in names)}
        if links and all(link.startswith("NV") for link in links):
            return ONE_NODE, f"one node, {', '.join(sorted(links))} between all GPUs"
        return None, "one node without NVLink between all GPUs"
    active = [port for port in list_ports(machine) if port.active]
    if active and not machine.folders("dev/infiniband"):
        return "ethernet", "RDMA devices cannot be used, since /dev/infiniband is missing"
    for link, preset in (("InfiniBand", "infiniband"), ("Ethernet", "roce")):
        if ports := [port for port in active if port.link == link]:
            return preset, f"{', '.join(sorted({port.device for port in ports}))}, {ports[0].rate}"
    if active:
        return None, f"{active[0].device} is neither InfiniBand nor RoCE"
    return "ethernet", "several nodes, no active InfiniBand or RoCE port"


def _text(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in variables.items())
