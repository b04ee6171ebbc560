"""Transformer Engine, apex, flash-attn, DeepEP and vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaswift.diagnosis.compiled_extensions import (
    apex_findings,
    extension_findings,
    import_finding,
    transformer_engine_parts,
    wheel_tag_findings,
)
from megaswift.diagnosis.installed import Software
from tests.diagnosis.fake_machine import only, put_distribution, write_tree
from tests.diagnosis.test_torch_build import CUDA

SYMBOL = "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c105Error"


def software(**imports: str) -> Software:
    return Software({}, CUDA, {"torch": "", **{name.replace("__", "."): error for name, error in imports.items()}})


def test_what_is_installed_is_named() -> None:
    found = {f.name: f for f in extension_findings(software(deep_ep="", flash_attn=SYMBOL, vllm___C=SYMBOL))}
    assert {name: f.state for name, f in found.items()} == {
        "transformer-engine": "note",
        "flash-attn": "problem",
        "DeepEP": "ok",
        "vLLM": "problem",
    }
    assert "was built for another torch than 2.9.0+cu128" in found["flash-attn"].found
    assert "--no-build-isolation" in found["flash-attn"].fix and "environment of its own" in found["vLLM"].fix
    assert list(extension_findings(Software({}, {"cuda_available": False}))) == [], "without a GPU none is needed"


@pytest.mark.parametrize(
    ("error", "told", "fix"),
    [
        ("ended with SIGSEGV", "built for another torch", "build"),
        (
            "ImportError: libcudnn.so.9: cannot open shared object file: No such file",
            "libcudnn.so.9 is not",
            "has libcudnn.so.9",
        ),
        ("ImportError: libcuda.so.1: cannot open shared object file: No such", "libcuda.so.1 is not", "NVIDIA driver"),
        ("ModuleNotFoundError: No module named 'einops'", "No module named 'einops'", "build"),
    ],
)
def test_why_an_import_fails(error: str, told: str, fix: str) -> None:
    finding = import_finding("X", "x", software(x=error), "build")
    assert finding.state == "problem" and told in finding.found and fix in finding.fix
    without = import_finding("X", "x", Software({}, {}, {"torch": "broken", "x": error}), "build")
    assert without.state == "note" and "torch" in without.fix


def test_parts_of_transformer_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(transformer_engine_parts("12.8")) == []
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("transformer-engine", "transformer-engine-torch", "transformer-engine-cu12"):
        put_distribution(tmp_path, name, "2.9.0")
    assert list(transformer_engine_parts("12.8")) == [] and list(transformer_engine_parts(None)) == []
    finding = only(transformer_engine_parts("13.0"))
    assert finding.state == "problem" and "cu12 is installed, but torch has CUDA 13.0" in finding.found
    assert "transformer-engine[core_cu13,pytorch]==2.9.0" in finding.fix


def test_parts_of_different_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    put_distribution(tmp_path, "transformer-engine", "2.9.0+abc")
    put_distribution(tmp_path, "transformer-engine-cu12", "2.9.0")
    put_distribution(tmp_path, "transformer-engine-torch", "2.8.0")
    finding = only(transformer_engine_parts("12.8"))
    assert finding.state == "problem" and finding.found.endswith("but transformer-engine-torch 2.8.0")
    assert "[pytorch]==2.9.0'" in finding.fix


@pytest.mark.parametrize(
    ("version", "wrong"),
    [
        ("2.8.3", []),
        ("2.8.3+cu12torch2.9cxx11abiTRUE", []),
        ("2.8.3+cu12torch2.8cxx11abiTRUE", ["torch 2.8, 2.9.0+cu128 is installed"]),
        ("2.8.3+cu11torch2.9cxx11abiFALSE", ["CUDA 11, torch has 12.8", "cxx11 ABI FALSE, torch has TRUE"]),
    ],
)
def test_tag_of_a_wheel(version: str, wrong: list[str]) -> None:
    found = list(wheel_tag_findings(version, software()))
    assert len(found) == bool(wrong) and all(text in found[0].found and found[0].fix for text in wrong)


def test_the_other_apex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(apex_findings(software())) == []
    write_tree(
        tmp_path, {"apex/__init__.py": "from pyramid.session import SignedCookieSessionFactory\n", "apex/models.py": ""}
    )
    monkeypatch.syspath_prepend(tmp_path)
    finding = only(apex_findings(software()))
    assert finding.state == "problem" and "not NVIDIA's apex" in finding.found and "pip uninstall apex" in finding.fix


@pytest.mark.parametrize(
    ("imports", "state", "told"),
    [
        ({}, "note", "without its CUDA extensions"),
        ({"amp_C": ""}, "ok", "amp_C can be imported"),
        ({"amp_C": SYMBOL}, "problem", "built for another torch"),
    ],
)
def test_nvidia_s_apex(imports: dict, state: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tree(tmp_path, {"apex/__init__.py": "", "apex/optimizers/__init__.py": ""})
    monkeypatch.syspath_prepend(tmp_path)
    finding = only(apex_findings(software(**imports)))
    assert finding.state == state and told in finding.found
