"""Environment variables that slow a run down or make it fail."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from megaswift.diagnosis.finding import Finding, State
from megaswift.diagnosis.hubs import is_set

ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
WORKER = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class HarmConditions:
    """What decides whether a variable does harm here."""

    gpus: int = 0
    nvlink: bool = False
    infiniband: bool = False
    several_nodes: bool = False
    old_vllm: bool = False
    """vLLM before 0.33, which leaves such segments out of the memory of its sleep mode by itself."""
    cores: int = field(default_factory=lambda: os.cpu_count() or 1)
    interfaces: tuple[str, ...] = field(default_factory=lambda: tuple(name for _, name in socket.if_nameindex()))


@dataclass(frozen=True)
class HarmfulVariable:
    """A variable, the values meant, and what they do."""

    name: str
    harms: Callable[[str, HarmConditions], bool]
    effect: str
    fix: str = ""
    state: State = "note"


def _on(value: str, facts: HarmConditions) -> bool:
    return is_set(value)


HARMFUL = (
    HarmfulVariable("CUDA_LAUNCH_BLOCKING", _on, "the CPU waits for every kernel: for debugging only"),
    HarmfulVariable("PYTORCH_NO_CUDA_MEMORY_CACHING", _on, "every tensor is allocated by the driver: very slow"),
    HarmfulVariable(
        "NVIDIA_TF32_OVERRIDE", lambda v, f: v == "1", "products in float32 use TF32 everywhere: less precise"
    ),
    HarmfulVariable(
        "NCCL_IB_DISABLE",
        lambda v, f: is_set(v) and f.infiniband and not f.several_nodes,
        "NCCL does not use the InfiniBand devices of this machine; harmless on a single node",
    ),
    HarmfulVariable(
        "NCCL_IB_DISABLE",
        lambda v, f: is_set(v) and f.infiniband and f.several_nodes,
        "NCCL uses TCP between the nodes, although this machine has active InfiniBand devices",
        state="problem",
    ),
    HarmfulVariable(
        "NCCL_P2P_DISABLE", lambda v, f: is_set(v) and f.nvlink, "NCCL does not use the NVLink of this machine"
    ),
    HarmfulVariable("NCCL_SHM_DISABLE", _on, "NCCL does not use shared memory between the GPUs of a machine"),
    HarmfulVariable(
        "NCCL_DEBUG", lambda v, f: v.upper() in ("INFO", "TRACE"), "NCCL writes many lines in every process"
    ),
    HarmfulVariable("TORCH_DISTRIBUTED_DEBUG", lambda v, f: v.upper() == "DETAIL", "every collective is checked: slow"),
    HarmfulVariable(
        "CUDA_VISIBLE_DEVICES",
        lambda v, f: f.gpus > 0 and v.strip() in ("", "-1", "NoDevFiles"),
        "hides all GPUs: runs use the CPU",
    ),
    HarmfulVariable(
        "OMP_NUM_THREADS",
        lambda v, f: v.isdigit() and int(v) * max(1, f.gpus) > f.cores,
        "the processes of a run have more threads than this machine has cores",
        "set OMP_NUM_THREADS to cores / processes, or unset it",
    ),
    *(
        HarmfulVariable(
            name,
            lambda v, f: f.old_vllm and "expandable_segments:true" in v.lower(),
            "conflicts with the sleep mode of colocated vLLM samplers before vLLM 0.33",
            f"unset {name} for runs with --vllm_mode colocate",
        )
        for name in ALLOCATOR
    ),
    *(
        HarmfulVariable(
            name,
            lambda v, f: v.isdigit(),
            "commands started in this shell take themselves for a worker of torchrun",
        )
        for name in WORKER
    ),
    HarmfulVariable(
        "NCCL_SOCKET_IFNAME",
        lambda v, f: not nccl_interfaces(v, f.interfaces),
        "no network interface of this machine matches: NCCL fails when it starts",
        "ip link lists the interfaces; unset it to let NCCL choose",
        "problem",
    ),
    HarmfulVariable(
        "GLOO_SOCKET_IFNAME",
        lambda v, f: any(name not in f.interfaces for name in v.split(",")),
        "no such network interface on this machine: gloo fails when it starts",
        "ip link lists the interfaces; unset it to let megaswift choose",
        "problem",
    ),
    *(
        HarmfulVariable(
            name,
            lambda v, f: f.several_nodes and v.lstrip("=") == "lo",
            "loopback: other nodes cannot connect",
            f"set {name} to the interface of the nodes' network, or unset it",
            "problem",
        )
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    ),
)


def nccl_interfaces(value: str, names: tuple[str, ...]) -> list[str]:
    """Interfaces that NCCL_SOCKET_IFNAME selects: names begin with an entry, `=` means exactly, `^` not."""
    excluded = value.startswith("^")
    exact = value.lstrip("^").startswith("=")
    entries = [entry for entry in value.lstrip("^").lstrip("=").split(",") if entry]
    matching = [n for n in names if any(n == e if exact else n.startswith(e) for e in entries)]
    return [n for n in names if n not in matching] if excluded else matching


def variable_findings(environ: Mapping[str, str], facts: HarmConditions) -> Iterator[Finding]:
    """One of each variable that does harm; one in all where none does."""
    found = [
        Finding(row.name, row.state, f"{environ[row.name] or 'empty'}: {row.effect}", row.fix or f"unset {row.name}")
        for row in HARMFUL
        if row.name in environ and row.harms(environ[row.name], facts)
    ]
    yield from found or [Finding("environment variables", "ok", "none that slows a run down or makes it fail")]
