"""`megaswift doctor`: prints package versions and devices, for users and bug reports."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Iterator
from importlib import metadata

from megaswift.command_line_common import HELP
from megaswift.config.transformer_engine_rules import has_transformer_engine
from megaswift.errors import Problem, UserError
from megaswift.version import __version__

PACKAGES = (
    "torch",
    "megatron-core",
    "transformer-engine",
    "transformers",
    "tokenizers",
    "safetensors",
    "datasets",
    "numpy",
    "pyyaml",
    "tensorboard",
    "wandb",
)


def main(argv: list[str]) -> int:
    """Prints the report; takes no options."""
    if argv and argv[0] not in HELP:
        raise UserError(Problem(f"megaswift doctor {argv[0]}", "takes no options", "megaswift doctor"))
    if argv:
        print("megaswift doctor     print package versions and devices; takes no options")
        return 0
    print("\n".join(doctor_report()))
    return 0


def doctor_report() -> Iterator[str]:
    """Lines `name  value`."""
    yield f"{'megaswift':<22}{__version__}"
    yield (
        f"{'python':<22}{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} "
        f"CPU cores"
    )
    for package in PACKAGES:
        yield f"{package:<22}{_version(package)}"
    if importlib.util.find_spec("torch") is None:
        yield f"{'devices':<22}unknown without torch"
        return
    import torch

    for i in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(i)
        yield (
            f"{f'cuda:{i}':<22}{device.name}, {device.total_memory / 2**30:.1f} GiB, capability "
            f"{device.major}.{device.minor}"
        )
    if torch.cuda.is_available():
        yield f"{'CUDA, NCCL':<22}{torch.version.cuda}, {'.'.join(map(str, torch.cuda.nccl.version()))}"
    else:
        yield f"{'devices':<22}CPU only: runs use gloo"
    layers = "transformer_engine" if torch.cuda.is_available() and has_transformer_engine() else "torch"
    yield f"{'layers':<22}{layers} (transformer_impl auto)"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
