"""The C compiler and Python's headers, with which Triton before 3.9 compiles a launcher for each kernel."""

from __future__ import annotations

import re
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from importlib import util
from pathlib import Path

from megaswift.diagnosis.finding import Finding
from megaswift.diagnosis.installed import Software, installed_version

DISTRIBUTIONS = ("triton", "pytorch-triton")
"""Triton's distributions: of releases, and of nightly builds."""
WITHOUT_COMPILER = (3, 9)
"""The first release of Triton that launches kernels without compiling anything."""
FIX = "run apt-get install gcc python3-dev (or yum install gcc python3-devel)"


def missing_for_triton(environ: Mapping[str, str]) -> str:
    """Why Triton cannot launch kernels on this machine, which has a GPU; empty where it can.

    Looks for what Triton's `runtime/build.py` looks for: the program in CC, gcc or clang, and Python.h.
    """
    if util.find_spec("triton") is None:
        return "the package triton is not installed"
    version = next((v for name in DISTRIBUTIONS if (v := installed_version(name))), "")
    release = re.match(r"(\d+)\.(\d+)", version)
    if release is not None and (int(release[1]), int(release[2])) >= WITHOUT_COMPILER:
        return ""
    named = environ.get("CC")
    if not any(shutil.which(name, path=environ.get("PATH")) for name in ([named] if named else ("gcc", "clang"))):
        return f"the C compiler {named} (from CC) is not found" if named else "there is no C compiler (gcc, clang)"
    header = include_folder() / "Python.h"
    return "" if header.is_file() else f"Python's headers are not installed ({header})"


def include_folder() -> Path:
    """Where Triton has Python.h included from."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])


def compiler_findings(software: Software, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Whether Triton can launch kernels; matters with a GPU only."""
    if not software.torch.get("cuda_available"):
        return
    missing = missing_for_triton(environ)
    if not missing:
        yield Finding("Triton", "ok", "can launch kernels")
        return
    found = f"{missing}: runs use slower torch functions in place of Triton kernels and torch.compile; vLLM fails"
    yield Finding("Triton", "problem", found, "run pip install triton" if "package" in missing else FIX)
