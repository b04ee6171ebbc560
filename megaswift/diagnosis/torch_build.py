"""torch's build against the NVIDIA driver, the GPUs and the installed NCCL."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megaswift.diagnosis.finding import Finding
from megaswift.diagnosis.gpu_devices import GpuListing
from megaswift.diagnosis.installed import Software, installed_version

INSTALL = "install the build of torch for this driver's CUDA (pytorch.org, Get Started)"


def torch_findings(software: Software, listing: GpuListing) -> Iterator[Finding]:
    """Nothing more where torch cannot be imported."""
    error = software.imports.get("torch")
    if error is None:
        yield Finding("torch", "problem", "not installed", "run pip install torch")
        return
    if error:
        yield Finding("torch", "problem", f"cannot be imported: {error}", "run pip install --force-reinstall torch")
        return
    yield cuda_finding(software, listing)
    yield from architecture_findings(software)
    yield from nccl_findings(software)


def cuda_finding(software: Software, listing: GpuListing) -> Finding:
    """torch's CUDA version and the newest that the driver supports."""
    version = software.torch["version"]
    cuda = software.torch["cuda"]
    named = f"torch {version}" + (f", CUDA {cuda}" if cuda else ", without CUDA")
    if not listing.devices:
        return Finding("torch", "ok", f"{named}; no NVIDIA GPU: runs use gloo on the CPU")
    if not cuda:
        return Finding("torch", "problem", f"{named}, although nvidia-smi lists {len(listing.devices)} GPUs", INSTALL)
    newest = listing.driver_cuda
    if newest and _major(cuda) > _major(newest) and not software.torch["cuda_available"]:
        found = f"{named}; driver {listing.driver} supports CUDA up to {newest}"
        return Finding("torch", "problem", found, f"update the driver, or {INSTALL}")
    if not software.torch["cuda_available"]:
        found = f"{named}; torch sees none of the {len(listing.devices)} GPUs that nvidia-smi lists"
        fix = "check CUDA_VISIBLE_DEVICES, and in a container that its runtime passes the GPUs (docker run --gpus all)"
        return Finding("torch", "problem", found, fix)
    return Finding("torch", "ok", f"{named}; driver {listing.driver}, CUDA up to {newest or 'unknown'}")


def architecture_findings(software: Software) -> Iterator[Finding]:
    """GPUs for which torch has no kernels."""
    architectures = software.torch["architectures"]
    for device in software.torch["devices"]:
        major, minor = device["capability"]
        if architectures and not runs_on(architectures, major, minor):
            found = f"{device['name']} has capability {major}.{minor}; torch has kernels for {', '.join(architectures)}"
            yield Finding("torch", "problem", found, "install a build of torch for this GPU (pytorch.org, Get Started)")
            return


def runs_on(architectures: list[str], major: int, minor: int) -> bool:
    """Whether code for one of `sm_90`, `sm_90a`, `compute_90`, ... runs on a GPU of this capability: binaries within a
    major version, PTX on all later ones. Code with a letter runs on its own capability only."""
    for name in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)([a-z]?)", name)
        if match is None:
            continue
        kind, digits, letter = match.groups()
        own = divmod(int(digits), 10)
        if letter:
            fits = own == (major, minor)
        elif kind == "sm":
            fits = own[0] == major and own[1] <= minor
        else:
            fits = own <= (major, minor)
        if fits:
            return True
    return False


def nccl_findings(software: Software) -> Iterator[Finding]:
    """The NCCL that torch loads, and the NCCL package for its CUDA."""
    loaded = software.torch["nccl"]
    cuda = software.torch["cuda"]
    if not loaded:
        return
    package = f"nvidia-nccl-cu{_major(cuda)}"
    installed = installed_version(package)
    if installed and installed.split(".")[:3] != loaded.split(".")[:3]:
        found = f"torch loads {loaded}; the package {package} is {installed}"
        fix = (
            "remove other copies of libnccl.so.2 from LD_LIBRARY_PATH and LD_PRELOAD; all nodes must load the same NCCL"
        )
        yield Finding("NCCL", "note", found, fix)
    else:
        yield Finding("NCCL", "ok", loaded)


def _major(version: str) -> int:
    return int(version.split(".")[0])
