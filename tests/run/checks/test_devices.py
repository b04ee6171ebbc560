"""Options that this machine's device or environment rules out, before a process group exists."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megaswift.config import SwiftConfig
from megaswift.run.checks.devices import device_dependent_option_problems

SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def found(environ: dict[str, str] | None = None, **options: Any) -> list[str]:
    return [str(p) for p in device_dependent_option_problems(SwiftConfig(task="sft", **options), environ or {})]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"cuda_graph_impl": "local"}, "--cuda_graph_impl local: there is no CUDA device"),
        ({"jit_fuser": True}, "--jit_fuser true: there is no CUDA device"),
        ({"optimizer_cpu_offload": True}, "--optimizer_cpu_offload true: there is no CUDA device"),
    ],
)
def test_what_a_cpu_cannot_do(options: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused with what to say instead, and served where there is a GPU."""
    (problem,) = found(**options)
    assert problem.startswith(what) and "try: " in problem
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert found(**options) == []


def test_nothing_is_asked_of_a_run_on_a_cpu() -> None:
    assert found() == found(jit_fuser=False) == []


def test_memory_that_moves_under_captured_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (problem,) = found(SEGMENTS, cuda_graph_impl="local")
    assert "PYTORCH_CUDA_ALLOC_CONF" in problem and "NCCL_GRAPH_REGISTER=0" in problem
    assert found(SEGMENTS | {"NCCL_GRAPH_REGISTER": "0"}, cuda_graph_impl="local") == []
    assert found(SEGMENTS, jit_fuser=True) == []
