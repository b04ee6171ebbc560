"""GPUs as nvidia-smi lists them: driver, memory in use, errors, compute mode."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megaswift.base.byte_size import bytes_text
from megaswift.diagnosis.finding import Finding
from megaswift.diagnosis.machine import Machine

FIELDS = (
    "index",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "ecc.errors.uncorrected.volatile.total",
    "compute_mode",
    "mig.mode.current",
)
LIMIT_S = 20.0
BUSY_SHARE = 0.1
"""The share of a GPU's memory that, in use before a run, shows that another process has it."""


@dataclass(frozen=True)
class GpuDevice:
    """A row of nvidia-smi; memory in MiB."""

    index: str
    name: str
    memory: float
    used: float
    errors: str
    compute_mode: str
    mig: str


@dataclass(frozen=True)
class GpuListing:
    """All rows; `failure`: what nvidia-smi says where it does not work, None where the program is not there."""

    devices: tuple[GpuDevice, ...] = ()
    driver: str = ""
    driver_cuda: str = ""
    """The newest CUDA version that the driver supports."""
    failure: str | None = ""


def list_gpus(machine: Machine) -> GpuListing:
    """Asks nvidia-smi."""
    query = machine.program(["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"], LIMIT_S)
    if query is None:
        return GpuListing(failure=None)
    if query.code:
        lines = f"{query.text}\n{query.error}".strip().splitlines() or [f"exit code {query.code}"]
        return GpuListing(failure=lines[0])
    rows = [[cell.strip() for cell in line.split(",")] for line in query.text.splitlines() if line.strip()]
    rows = [row for row in rows if len(row) == len(FIELDS)]
    devices = tuple(
        GpuDevice(index, name, _number(total), _number(used), errors, mode, mig)
        for index, name, _, total, used, errors, mode, mig in rows
    )
    page = machine.program(["nvidia-smi"], LIMIT_S)
    cuda = re.search(r"CUDA (?:UMD )?Version: *(\d+\.\d+)", page.text if page is not None else "")
    return GpuListing(devices, rows[0][2] if rows else "", cuda[1] if cuda else "")


def _number(text: str) -> float:
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else 0.0


def gpu_findings(listing: GpuListing, machine: Machine) -> Iterator[Finding]:
    """Yields findings about the listing as a whole, then about each GPU."""
    if listing.failure is None:
        if machine.folders("proc/driver/nvidia/gpus"):
            fix = "install the driver's tools (nvidia-utils), or give the container NVIDIA_DRIVER_CAPABILITIES=all"
            yield Finding("GPUs", "note", "the NVIDIA driver has GPUs, but nvidia-smi is not on PATH", fix)
        else:
            yield Finding("GPUs", "ok", "no NVIDIA GPU")
        return
    if listing.failure:
        mismatch = "version mismatch" in listing.failure
        fix = (
            "restart the machine: the driver was updated while the old one is loaded"
            if mismatch
            else ("check that the driver is loaded (lsmod, dmesg), and in a container that its runtime passes the GPUs")
        )
        yield Finding("GPUs", "problem", f"nvidia-smi: {listing.failure}", fix)
        return
    names = sorted({device.name for device in listing.devices})
    if not names:
        yield Finding("GPUs", "ok", "nvidia-smi lists no GPU")
    elif len(names) > 1:
        fix = "choose equal ones with CUDA_VISIBLE_DEVICES; the slowest GPU sets the speed of every step"
        yield Finding("GPUs", "note", f"different kinds: {', '.join(names)}", fix)
    else:
        memory = bytes_text(min(d.memory for d in listing.devices) * 2**20)
        yield Finding("GPUs", "ok", f"{len(listing.devices)} x {names[0]}, {memory}")
    for device in listing.devices:
        yield from device_findings(device)


def device_findings(device: GpuDevice) -> Iterator[Finding]:
    """What may stop or slow a run on one GPU."""
    name = f"GPU {device.index}"
    if _number(device.errors):
        found = f"{device.errors} uncorrected memory errors since the driver was loaded"
        yield Finding(name, "problem", found, f"reset the GPU (nvidia-smi -i {device.index} -r) or take it out of use")
    if device.compute_mode == "Prohibited":
        fix = f"run nvidia-smi -i {device.index} -c DEFAULT"
        yield Finding(name, "problem", "compute mode Prohibited: no process can use it", fix)
    if device.used > BUSY_SHARE * device.memory > 0:
        found = f"{bytes_text(device.used * 2**20)} of {bytes_text(device.memory * 2**20)} are in use"
        yield Finding(name, "note", found, f"nvidia-smi -i {device.index} lists the processes that use it")
    if device.mig == "Enabled":
        found = "MIG is enabled: NCCL connects no two instances of one GPU"
        yield Finding(name, "note", found, "use one process per GPU, or disable MIG for runs with several processes")
