"""`--nccl_preset`: sets NCCL's variables for a kind of network, in each process of a run before it joins a process
group.

Owns the choice of a preset by the node's devices (`auto`). Variables that the user has set are kept. The presets
themselves, with their reasons, are in `clusters/network_presets.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from megaswift.clusters.network_presets import network_variables
from megaswift.diagnosis.gpu_devices import LIMIT_S
from megaswift.diagnosis.gpu_topology import parse_topology
from megaswift.diagnosis.infiniband import list_ports
from megaswift.diagnosis.machine import Machine
from megaswift.errors import ConfigError, Problem
from megaswift.launchers.options.variables import nproc_or_nnodes_started_by_launcher

NONE = "none"
AUTO = "auto"
ONE_NODE = "nvlink_node"
OPTION = "--nccl_preset"


def apply_nccl_preset(preset: str, environ: MutableMapping[str, str], gpu: bool, machine: Machine | None = None) -> str:
    """Set those variables of the preset that are not set yet.

    Args:
        preset: A preset's name, or `auto`.
        environ: The environment, which is changed.
        gpu: Whether this run communicates through NCCL.
        machine: The machine whose devices `auto` looks at; None: this one.

    Returns:
        A line for the user: what was set and kept, or why nothing was.

    Raises:
        ConfigError: The preset is not for this number of nodes.
    """
    # Runs for which the preset is wrong or has no effect.
    nodes = node_count(environ)
    if preset == ONE_NODE and nodes > 1:
        rule = f"is for a single node, and the launcher started {nodes}"
        fix = f"{OPTION} auto"
        raise ConfigError(Problem(f"{OPTION} {preset}", rule, fix))
    if not gpu:
        return f"{OPTION} {preset} has no effect: without a GPU, processes do not communicate through NCCL"
    if int(environ.get("WORLD_SIZE", "1")) == 1:
        return f"{OPTION} {preset} has no effect: the run is one process"

    # The preset.
    reason = ""
    if preset == AUTO:
        found, devices = preset_by_devices(machine or Machine(dict(environ)), nodes)
        if found is None:
            return f"{OPTION} auto: {devices}; nothing is set, NCCL chooses"
        preset = found
        reason = f" (auto: {devices})"

    # Its variables; those of the user stay.
    variables = network_variables(preset)
    kept = {name: environ[name] for name in variables if name in environ}
    added = {name: value for name, value in variables.items() if name not in environ}
    environ.update(added)
    kept_text = f"; set before and kept: {_text(kept)}" if kept else ""
    return f"{OPTION} {preset}{reason}: {_text(added) or 'nothing to set'}{kept_text}"


def node_count(environ: Mapping[str, str]) -> int:
    """Return the number of nodes of the run to which this process belongs; 1 for a process without a launcher."""
    given = nproc_or_nnodes_started_by_launcher("nnodes", environ)
    if given is not None:
        return given
    world = int(environ.get("WORLD_SIZE", "1"))
    local = int(environ.get("LOCAL_WORLD_SIZE", "0"))
    return -(-world // local) if local else 1


def preset_by_devices(machine: Machine, nodes: int) -> tuple[str | None, str]:
    """Return the preset for this machine's devices, and the devices in words; None in place of the preset if none
    fits.

    A single node is judged by its NVLink connections, several nodes by the ports between them.
    """
    if nodes == 1:
        topology = machine.program(["nvidia-smi", "topo", "-m"], LIMIT_S)
        pairs = parse_topology(topology.text) if topology is not None and not topology.code else {}
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
