"""What Triton needs to launch kernels: looked for before a kernel is, and told by doctor.

Covers: megaswift/diagnosis/c_compiler.py, megaswift/engine/triton_support.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaswift.config import SwiftConfig
from megaswift.diagnosis import c_compiler
from megaswift.diagnosis.c_compiler import compiler_findings, missing_for_triton
from megaswift.diagnosis.installed import Software
from megaswift.engine import jit_fuser, triton_support
from megaswift.engine.triton_support import runs_triton_kernels, triton_launches
from megaswift.run.checks import torch_engine
from tests.diagnosis.fake_machine import only, put_distribution, put_program, write_tree

Machine = Callable[..., dict[str, str]]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Makes this machine one with a Triton of a version, programs and headers; gives its variables."""

    def make(version: str = "3.7.1", programs: tuple[str, ...] = ("gcc",), headers: bool = True) -> dict[str, str]:
        place = tmp_path / "-".join([version, *programs, str(headers)])
        write_tree(place, {"triton/__init__.py": "", **({"include/Python.h": ""} if headers else {})})
        put_distribution(place, "triton", version)
        for name in programs:
            put_program(place / "bin", name, "")
        monkeypatch.syspath_prepend(place)
        monkeypatch.setattr(c_compiler, "include_folder", lambda: place / "include")
        monkeypatch.setenv("PATH", str(place / "bin"))
        monkeypatch.delenv("CC", raising=False)
        triton_launches.cache_clear()
        return dict(os.environ)

    yield make
    triton_launches.cache_clear()


@pytest.mark.parametrize(
    ("made", "cc", "missing"),
    [
        ({}, "", ""),
        ({"programs": ("clang",)}, "", ""),
        ({"programs": ()}, "", "there is no C compiler (gcc, clang)"),
        ({"programs": ("tcc",)}, "tcc", ""),
        ({}, "icc", "the C compiler icc (from CC) is not found"),
        ({"headers": False}, "", "Python's headers are not installed"),
        ({"version": "3.6.0", "programs": ()}, "", "there is no C compiler"),
        ({"version": "3.9.0", "programs": (), "headers": False}, "", ""),
        ({"version": "3.10.0+git1", "programs": ()}, "", ""),
    ],
)
def test_what_triton_lacks(machine: Machine, made: dict[str, Any], cc: str, missing: str) -> None:
    environ = machine(**made) | ({"CC": cc} if cc else {})
    found = missing_for_triton(environ)
    assert found.startswith(missing) and bool(found) == bool(missing)


def test_doctor_tells_of_it_on_a_machine_with_a_gpu(machine: Machine) -> None:
    gpu = Software({}, {"cuda_available": True})
    assert only(compiler_findings(gpu, machine())).state == "ok"
    finding = only(compiler_findings(gpu, machine(programs=())))
    assert finding.state == "problem" and "there is no C compiler" in finding.found and "python3-dev" in finding.fix
    assert list(compiler_findings(Software({}, {"cuda_available": False}), machine(programs=()))) == []


def test_torch_s_path_is_taken_with_one_warning(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """For the kernels of a tensor on a GPU and for torch.compile, which both launch by Triton."""
    device: Any = SimpleNamespace(is_cuda=True)
    host: Any = SimpleNamespace(is_cuda=False)
    machine()
    assert runs_triton_kernels(device) and not runs_triton_kernels(host)
    assert jit_fuser.fuses_pointwise_functions(cuda=True)
    machine(programs=())
    assert not runs_triton_kernels(host) and not capsys.readouterr().err, "nothing is told where there is no GPU"
    assert [runs_triton_kernels(device) for _ in range(3)] == [False] * 3
    assert not jit_fuser.fuses_pointwise_functions(cuda=True)
    told = capsys.readouterr().err
    assert told.count("warning") == 1 and "there is no C compiler" in told and "apt-get install gcc" in told


@pytest.mark.parametrize(
    ("check", "options"),
    [
        ("native_compiler_problems", {"jit_fuser": True}),
        ("native_compiler_problems", {"moe_permute_fusion": True}),
        ("torch_engine_machine_problems", {"engine": "ddp", "torch_compile": True}),
        ("torch_engine_machine_problems", {"engine": "ddp", "attn_impl": "flex"}),
        ("torch_engine_machine_problems", {"engine": "ddp", "use_liger": True}),
    ],
)
def test_what_is_asked_for_is_refused(
    machine: Machine, check: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_engine, "has_gpu", lambda: True)
    monkeypatch.setattr(torch_engine, "find_spec", lambda name: object())
    cfg = SwiftConfig(task="sft", **options)
    problems = getattr(torch_engine, check)
    read = cfg.model if check == "native_compiler_problems" else cfg
    machine()
    assert problems(read) == []
    machine(programs=())
    [problem] = problems(read)
    assert "there is no C compiler" in str(problem) and "apt-get install gcc" in str(problem)
    assert triton_support.FIX in str(problem)
