"""Versions, and imports in a process of their own.

Covers: megaswift/diagnosis/import_probe.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megaswift.diagnosis import import_probe
from megaswift.diagnosis.installed import (
    has_module,
    installed_versions,
    modules_to_import,
    probe_imports,
    vllm_extension,
)
from tests.diagnosis.fake_machine import put_distribution, write_tree

BROKEN = {
    "crashes.py": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n",
    "raises.py": "raise ImportError('undefined symbol: _ZN5torch3jit')\n",
    "odd.py": "raise KeyError('x')\n",
    "talks.py": "print('hello from a library')\n",
}


@pytest.mark.process
def test_each_import_has_its_own_error_and_none_stops_the_others(tmp_path: Path) -> None:
    write_tree(tmp_path, BROKEN)
    names = ["crashes", "raises", "odd", "talks"]
    software = probe_imports(names, {**os.environ, "PYTHONPATH": str(tmp_path)})
    assert list(software.imports) == names
    assert software.imports["crashes"] == "ended with SIGSEGV" and software.imports["talks"] == ""
    assert (
        "undefined symbol: _ZN5torch3jit" in software.imports["raises"] and "KeyError: 'x'" in software.imports["odd"]
    )
    assert software.torch == {}


@pytest.mark.process
def test_torch_is_described_and_stays_outside_of_this_process(tmp_path: Path) -> None:
    import torch

    software = probe_imports(["torch"], {**os.environ, "PYTHONPATH": ""})
    assert software.imports == {"torch": ""} and software.torch["version"] == torch.__version__
    assert software.torch["cuda"] == torch.version.cuda and len(software.torch["devices"]) == torch.cuda.device_count()
    assert software.torch == import_probe.torch_facts()
    write_tree(tmp_path, {"torch/__init__.py": "raise OSError('libcudart.so.12: cannot open')\n"})
    software = probe_imports(["torch"], {**os.environ, "PYTHONPATH": str(tmp_path)})
    assert software.torch == {} and "libcudart.so.12" in software.imports["torch"]


@pytest.mark.process
def test_an_import_that_hangs_is_ended(tmp_path: Path) -> None:
    write_tree(tmp_path, {"hangs.py": "import time\ntime.sleep(60)\n"})
    software = probe_imports(["hangs"], {**os.environ, "PYTHONPATH": str(tmp_path)}, 1.0)
    assert software.imports == {"hangs": "not imported within 1 s"}


def test_modules_and_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tree(
        tmp_path, {"deep_ep/__init__.py": "", "flash_attn/readme": "", "vllm/__init__.py": "", "vllm/_C.abi3.so": ""}
    )
    put_distribution(tmp_path, "vllm", "0.19.0")
    monkeypatch.syspath_prepend(tmp_path)
    assert has_module("deep_ep") and not has_module("flash_attn"), "a folder alone is no module"
    assert vllm_extension() == ["vllm._C"]
    assert modules_to_import() == ["torch", "deep_ep", "vllm._C"]
    versions = installed_versions()
    assert versions["vllm"] == "0.19.0" and versions["transformer-engine"] == "not installed" and "apex" not in versions
