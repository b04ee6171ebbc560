"""Requirements against installed versions."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from megaswift.diagnosis.requirements import (
    own_requirements,
    requirement_finding,
    requirement_findings,
    transformer_engine_range_findings,
    unmet_requirements,
)
from tests.diagnosis.fake_machine import only, put_distribution, states
from tests.sources import ROOT


def test_what_pyproject_asks_for_is_what_is_checked() -> None:
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert own_requirements() == asked and not list(unmet_requirements(asked))
    assert states(requirement_findings())["packages"] == "ok"


def test_unmet_requirements() -> None:
    torch = metadata.version("torch")
    rows = ["torch<2", "torch>=2", "nowhere>=1", "nowhere; extra == 'x'", "nowhere; python_version < '3'"]
    assert list(unmet_requirements(rows)) == [("torch<2", f"{torch} is installed"), ("nowhere>=1", "not installed")]


def test_a_vllm_for_another_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_distribution(tmp_path, "vllm", "0.11.0", ["torch==2.8.0", "numpy"])
    monkeypatch.syspath_prepend(tmp_path)
    finding = next(f for f in requirement_findings() if f.name == "vllm")
    assert finding.state == "problem" and "vllm 0.11.0 needs torch==2.8.0" in finding.found
    assert "pip install 'torch==2.8.0'" in finding.fix and "a version of vllm" in finding.fix


def test_an_old_package_of_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_distribution(tmp_path, "megatron-core", "0.15.0")
    monkeypatch.syspath_prepend(tmp_path)
    finding = requirement_finding("megaswift", own_requirements())
    assert finding.state == "problem" and "0.15.0 is installed" in finding.found and "megatron-core" in finding.fix


def test_a_transformer_engine_that_megatron_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(transformer_engine_range_findings()) == []
    put_distribution(tmp_path, "transformer-engine", "1.2.0")
    monkeypatch.syspath_prepend(tmp_path)
    named = [r for r in metadata.requires("megatron-core") or [] if r.startswith("transformer-engine[") and ">=" in r]
    for finding in transformer_engine_range_findings():
        assert finding.state == "note" and finding.found.startswith("1.2.0; megatron-core") and ">=" in finding.fix
    assert len(list(transformer_engine_range_findings())) == len(named)  # 0.19 names no versions


def test_outside_of_a_repository_the_installed_package_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_distribution(tmp_path, "megaswift", "0.1", ["torch>=99"])
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'another'\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert own_requirements(tmp_path) == ["torch>=99"]


def test_without_packaging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaswift.diagnosis.requirements.util.find_spec", lambda name: None)
    assert only(requirement_findings()).state == "problem"
