"""Libraries with compiled code: Transformer Engine, apex, flash-attn, DeepEP, vLLM. Whether each can be imported and
was built for the installed torch and CUDA."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import util
from pathlib import Path

from megaswift.diagnosis.finding import Finding
from megaswift.diagnosis.installed import Software, has_module, installed_version
from megaswift.engine.options.te import install_command

TE = "transformer-engine"
TE_MODULE = "transformer_engine.pytorch"
APEX = "https://github.com/NVIDIA/apex"
BUILT = {
    TE_MODULE: (TE, "run pip install --no-build-isolation --force-reinstall 'transformer-engine[pytorch]'"),
    "flash_attn": ("flash-attn", "run pip install --no-build-isolation --force-reinstall --no-deps flash-attn"),
    "flash_attn_interface": ("flash-attn 3", "build it again from the folder hopper of its repository"),
    "deep_ep": ("DeepEP", "build it again from its repository (https://github.com/deepseek-ai/DeepEP)"),
}
"""Module to the library's name and how it is built again for the installed torch."""
ABI = ("undefined symbol", "symbol not found", "version `GLIBCXX", "ended with SIG")
"""In an error of an import: the library was built for another torch or compiler."""


def extension_findings(software: Software) -> Iterator[Finding]:
    """Yields a finding for each installed library; a missing Transformer Engine matters only with a GPU."""
    gpu = bool(software.torch.get("cuda_available"))
    if TE_MODULE not in software.imports and gpu:
        found = "not installed: layers use torch's modules, without FP8 and fused kernels"
        yield Finding(TE, "note", found, f"run {install_command(software.torch.get('cuda'))} (docs/install.md)")
    yield from transformer_engine_parts(software.torch.get("cuda"))
    for module, (name, build) in BUILT.items():
        if module in software.imports:
            yield import_finding(name, module, software, build)
    yield from wheel_tag_findings(installed_version("flash-attn"), software)
    yield from apex_findings(software)
    for module in (m for m in software.imports if m.startswith("vllm.")):
        build = "run pip install -U vllm in an environment of its own, which brings the torch that it was built for"
        yield import_finding("vLLM", module, software, build)


def import_finding(name: str, module: str, software: Software, build: str) -> Finding:
    """Whether a module can be imported, and what is likely to be wrong where it cannot."""
    error = software.imports[module]
    if not error:
        return Finding(name, "ok", f"{module} can be imported")
    if software.imports.get("torch"):
        return Finding(name, "note", f"{module} cannot be imported without torch", "first see the finding about torch")
    if any(sign in error for sign in ABI):
        found = f"{module} was built for another torch than {software.torch.get('version')}: {error}"
        return Finding(name, "problem", found, build)
    if library := re.search(r"(lib[\w.+-]+\.so[\d.]*): cannot open shared object file", error):
        found = f"{module} cannot be imported: {library[1]} is not found"
        fix = f"install the package that has {library[1]} in the version for torch's CUDA"
        if library[1].startswith("libcuda."):
            fix = "this library needs the NVIDIA driver: run on a machine with a GPU, or uninstall the library"
        return Finding(name, "problem", found, f"{fix}; or {build}" if "driver" not in fix else fix)
    return Finding(name, "problem", f"{module} cannot be imported: {error}", build)


def transformer_engine_parts(cuda: str | None) -> Iterator[Finding]:
    """Transformer Engine comes as three packages: all of one version, the core for torch's CUDA."""
    whole = installed_version(TE)
    if not whole:
        return
    names = ("transformer-engine-torch", "transformer-engine-cu12", "transformer-engine-cu13")
    parts = {name: version for name in names if (version := installed_version(name))}
    different = [f"{name} {version}" for name, version in parts.items() if _public(version) != _public(whole)]
    if different:
        fix = f"run pip install --no-build-isolation 'transformer-engine[pytorch]=={_public(whole)}'"
        yield Finding(TE, "problem", f"{whole}, but {', '.join(different)}", fix)
    cores = [name for name in parts if name != names[0]]
    if cuda and cores and f"transformer-engine-cu{cuda.split('.')[0]}" not in cores:
        extra = f"core_cu{cuda.split('.')[0]}"
        fix = f"run pip install --no-build-isolation 'transformer-engine[{extra},pytorch]=={_public(whole)}'"
        yield Finding(TE, "problem", f"{', '.join(cores)} is installed, but torch has CUDA {cuda}", fix)


def wheel_tag_findings(version: str, software: Software) -> Iterator[Finding]:
    """A wheel of flash-attn says what it was built for: 2.8.3+cu12torch2.8cxx11abiTRUE."""
    tag = re.search(r"\+cu(\d+)torch(\d+\.\d+)cxx11abi(TRUE|FALSE)", version)
    if tag is None or not software.torch:
        return
    torch = str(software.torch["version"])
    cuda = str(software.torch["cuda"] or "none")
    wrong = []
    if ".".join(torch.split(".")[:2]) != tag[2]:
        wrong.append(f"torch {tag[2]}, {torch} is installed")
    if cuda.split(".")[0] != tag[1][:2]:
        wrong.append(f"CUDA {tag[1]}, torch has {cuda}")
    if software.torch["cxx11_abi"] != (tag[3] == "TRUE"):
        wrong.append(f"cxx11 ABI {tag[3]}, torch has {str(software.torch['cxx11_abi']).upper()}")
    if wrong:
        found = f"flash-attn {version} is for " + "; ".join(wrong)
        yield Finding("flash-attn", "problem", found, f"{BUILT['flash_attn'][1]}, or install the wheel for this torch")


def apex_findings(software: Software) -> Iterator[Finding]:
    """NVIDIA's apex, with or without its CUDA extensions, or the unrelated package of that name on PyPI."""
    if not has_module("apex"):
        return
    spec = util.find_spec("apex")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec is not None else []
    if not any((folder / "optimizers").is_dir() for folder in folders):
        where = folders[0] if folders else "apex"
        found = f"{where} is not NVIDIA's apex but another package of that name (PyPI's); nothing here can use it"
        fix = f"run pip uninstall apex; where NVIDIA's is needed, build it from {APEX}"
        yield Finding("apex", "problem", found, fix)
    elif "amp_C" not in software.imports:
        found = "NVIDIA's, built without its CUDA extensions (amp_C): its fused optimizers do not work"
        yield Finding("apex", "note", found, f"build it with its C++ and CUDA extensions ({APEX}), or uninstall it")
    else:
        yield import_finding("apex", "amp_C", software, f"build it again for this torch from {APEX}")


def _public(version: str) -> str:
    return version.split("+")[0]
