"""Versions of the installed packages, what torch says of its build and devices, and which modules can be imported."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any

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
"""Listed whether installed or not."""
OPTIONAL_PACKAGES = ("apex", "flash-attn", "deep-ep", "vllm", "sglang", "deepspeed", "bitsandbytes", "ray")
"""Listed where installed."""
EXTENSIONS = ("transformer_engine.pytorch", "amp_C", "flash_attn", "flash_attn_interface", "deep_ep")
"""Modules that load the compiled code of libraries. `transformer_engine` alone hides errors of its part for torch."""
IMPORT_LIMIT_S = 90.0


@dataclass(frozen=True)
class Software:
    """What is installed."""

    versions: Mapping[str, str]
    torch: Mapping[str, Any] = field(default_factory=dict)
    """The facts of `import_probe.torch_facts`; empty where torch cannot be imported."""
    imports: Mapping[str, str] = field(default_factory=dict)
    """Module to the error of its import; empty text: it was imported."""


def installed_version(package: str) -> str:
    """Empty where it is not installed."""
    try:
        return metadata.version(package) or ""
    except metadata.PackageNotFoundError:
        return ""


def installed_versions() -> dict[str, str]:
    """Returns the versions of `PACKAGES`, or `not installed`, and of those `OPTIONAL_PACKAGES` that are installed."""
    found = {name: installed_version(name) or "not installed" for name in PACKAGES}
    return found | {name: version for name in OPTIONAL_PACKAGES if (version := installed_version(name))}


def has_module(name: str) -> bool:
    """Whether a top-level module can be found; it is not imported. A folder without `__init__.py` is none."""
    try:
        spec = util.find_spec(name)
    except ValueError:  # a module that another put in place without a description
        return False
    return spec is not None and spec.origin is not None


def modules_to_import() -> list[str]:
    """torch, and the compiled extensions that are there."""
    return [name for name in ("torch", *EXTENSIONS) if has_module(name.split(".")[0])] + vllm_extension()


def vllm_extension() -> list[str]:
    """vLLM's compiled module: importing `vllm` alone loads nothing that depends on torch's ABI."""
    spec = util.find_spec("vllm") if has_module("vllm") else None
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    names = {p.name.split(".")[0] for folder in folders for p in Path(folder).glob("_C*.so")}
    return [f"vllm.{name}" for name in sorted(names)[:1]]


def probe_imports(names: Sequence[str], environ: Mapping[str, str], limit_s: float = IMPORT_LIMIT_S) -> Software:
    """Imports the modules in a process of their own. One that ends the process gets the signal as its error, and the
    process starts again with those after it."""
    rows: dict[str, dict[str, Any]] = {}
    while left := [name for name in names if name not in rows]:
        again = ["torch"] if "facts" in rows.get("torch", {}) else []
        found, ending = _run_probe([*again, *left], environ, limit_s)
        rows |= {name: row for name, row in found.items() if name in left}
        if unfinished := [name for name in left if name not in rows]:
            rows[unfinished[0]] = {"error": ending}
    facts = rows.get("torch", {}).get("facts", {})
    return Software(installed_versions(), facts, {name: row["error"] for name, row in rows.items()})


def _run_probe(words: list[str], environ: Mapping[str, str], limit_s: float) -> tuple[dict[str, dict[str, Any]], str]:
    """The rows that a probe printed, and how it ended."""
    program = [sys.executable, "-m", "megaswift.diagnosis.import_probe", *words]
    package = str(Path(__file__).resolve().parents[2])
    path = environ.get("PYTHONPATH", "")
    own = dict(environ) | {"PYTHONPATH": f"{package}:{path}" if path else package}
    try:
        done = subprocess.run(program, env=own, capture_output=True, text=True, timeout=limit_s, check=False)
        text = done.stdout
        code = done.returncode
        last = done.stderr.strip().splitlines()[-1:] or [""]
        ending = f"ended with {signal.Signals(-code).name}" if code < 0 else f"exit code {code} {last[0]}".strip()
    except subprocess.TimeoutExpired as error:
        text = (error.stdout or b"").decode()
        ending = f"not imported within {limit_s:.0f} s"
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]
    return {row["module"]: row for row in rows}, ending
