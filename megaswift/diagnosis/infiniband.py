"""InfiniBand and RoCE devices: state and rate of their ports, and what a process needs to use them."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass

from megaswift.diagnosis.finding import Finding
from megaswift.diagnosis.machine import Machine

DEVICES = "sys/class/infiniband"
ENOUGH_LOCKED = 1 << 30
IPC_LOCK = 14
"""Bit of the capability that lifts the limit of locked memory."""
PEER_MEMORY = ("nvidia_peermem", "nv_peer_mem")
"""Kernel modules by which a network device reads GPU memory."""


@dataclass(frozen=True)
class Port:
    """One of a device; `state` and `rate` as the kernel writes them: `4: ACTIVE`, `400 Gb/sec (4X NDR)`."""

    device: str
    number: str
    state: str
    physical: str
    rate: str
    link: str

    @property
    def active(self) -> bool:
        """Whether it carries data."""
        return "ACTIVE" in self.state


def list_ports(machine: Machine) -> list[Port]:
    """Returns the ports of all devices."""
    found = []
    for device in machine.folders(DEVICES):
        for number in machine.folders(f"{DEVICES}/{device}/ports"):
            base = f"{DEVICES}/{device}/ports/{number}"
            facts = [machine.read(f"{base}/{name}") for name in ("state", "phys_state", "rate", "link_layer")]
            found.append(Port(device, number, *facts))
    return found


def infiniband_findings(machine: Machine, locked_memory: int, gpus: bool) -> Iterator[Finding]:
    """`locked_memory`: the limit in bytes; `gpus`: whether the machine has NVIDIA GPUs."""
    ports = list_ports(machine)
    if not ports:
        yield Finding("InfiniBand", "ok", "no devices: several machines communicate over TCP")
        return
    active = [port for port in ports if port.active]
    down = [port for port in ports if not port.active]
    if not active:
        yield Finding("InfiniBand", "problem", f"no active port: {_text(down)}", _fix(down))
        return
    yield Finding("InfiniBand", "ok", _text(active))
    if down:
        yield Finding("InfiniBand", "note", f"not active: {_text(down)}", _fix(down))
    if len({port.rate for port in active}) > 1:
        fix = "check cables and switch ports, or choose equal devices with NCCL_IB_HCA"
        yield Finding("InfiniBand", "note", "ports have different rates; the slowest limits collectives", fix)
    if not machine.folders("dev/infiniband"):
        fix = (
            "in a container: docker run --device /dev/infiniband; on Kubernetes resources in clusters.yaml (rdma/ib: 8)"
        )
        yield Finding("InfiniBand", "problem", "/dev/infiniband is missing: processes cannot use the devices", fix)
    unlimited = locked_memory == resource.RLIM_INFINITY or locked_memory >= ENOUGH_LOCKED or may_lock_memory(machine)
    if not unlimited:
        found = f"limit of locked memory (ulimit -l) is {locked_memory // 1024} KiB; registering buffers fails"
        fix = "ulimit -l unlimited; memlock in /etc/security/limits.conf; docker run --ulimit memlock=-1"
        yield Finding("memlock", "problem", found, fix)
    if gpus and not any(machine.path(f"sys/module/{name}").is_dir() for name in PEER_MEMORY):
        found = (
            "nvidia_peermem is not loaded: without it, or DMA-BUF (open kernel driver), data goes through CPU memory"
        )
        yield Finding("GPUDirect RDMA", "note", found, "run modprobe nvidia_peermem as root")


def may_lock_memory(machine: Machine) -> bool:
    """Whether this process has the capability IPC_LOCK."""
    rows = (line.split() for line in machine.read("proc/self/status").splitlines())
    return any(int(row[1], 16) >> IPC_LOCK & 1 for row in rows if row[:1] == ["CapEff:"])


def _text(ports: list[Port]) -> str:
    return ", ".join(
        f"{p.device}:{p.number} {p.state.split(': ')[-1] or 'unknown state'} {p.rate} {p.link}".strip() for p in ports
    )


def _fix(ports: list[Port]) -> str:
    if any("LinkUp" in p.physical for p in ports):
        return "the link is up but not configured: check the subnet manager of the fabric (sminfo, ibstat)"
    return "check the cable and the port of the switch (ibstat, ip link)"
