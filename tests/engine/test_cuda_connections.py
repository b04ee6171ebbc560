"""CUDA_DEVICE_MAX_CONNECTIONS by layout and GPU, and that a run sets it before CUDA starts."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from megaswift.config import SwiftConfig
from megaswift.engine.diagnostics import cuda_connections
from megaswift.engine.diagnostics.cuda_connections import VARIABLE, gpu_compute_capability_major, set_max_connections
from megaswift.parallel.layout import Layout
from megaswift.run import engines

HOPPER, BLACKWELL = 9, 10


@pytest.mark.parametrize(
    ("axes", "sharded", "major", "before", "after", "warns"),
    [
        ({"tp": 2}, False, HOPPER, None, "1", ""),
        ({"tp": 2}, False, HOPPER, "1", "1", ""),
        ({"tp": 2}, False, HOPPER, "8", "8", "only with 1"),
        ({"cp": 2}, False, 8, None, "1", ""),
        ({"pp": 2}, False, HOPPER, None, None, ""),
        ({}, False, HOPPER, "8", "8", ""),
        ({"tp": 2}, False, BLACKWELL, None, None, ""),
        ({"tp": 2}, False, BLACKWELL, "8", "8", ""),
        ({"tp": 2}, False, None, None, None, ""),
        ({}, True, HOPPER, None, None, ""),
        ({}, True, HOPPER, "1", "1", "unset it"),
        ({}, True, HOPPER, "8", "8", ""),
        ({}, True, BLACKWELL, "1", "1", ""),
    ],
)
def test_the_rule(
    axes: dict[str, int], sharded: bool, major: int | None, before: str | None, after: str | None, warns: str
) -> None:
    environ = {} if before is None else {VARIABLE: before}
    text = set_max_connections(environ, Layout(world_size=8, **axes), sharded, lambda: major)
    assert environ.get(VARIABLE) == after
    assert bool(text) == bool(warns) and warns in text


class Nvml:
    """The functions of NVML that are called, with pointers as C has them."""

    def __init__(self, failing: str = "") -> None:
        self.failing, self.calls = failing, []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.calls.append(name)
            if name == "nvmlDeviceGetCudaComputeCapability":
                args[1]._obj.value, args[2]._obj.value = 9, 0
            return int(name == self.failing)

        return call


def test_the_gpu_is_known_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for failing, major in (
        ("", 9),
        ("nvmlInit_v2", None),
        ("nvmlDeviceGetHandleByIndex_v2", None),
        ("nvmlDeviceGetCudaComputeCapability", None),
    ):
        library = Nvml(failing)
        monkeypatch.setattr(
            cuda_connections,
            "ctypes",
            SimpleNamespace(**vars(ctypes) | {"CDLL": lambda _, library=library: library}),
        )
        assert gpu_compute_capability_major() == major
        assert (library.calls[-1] == "nvmlShutdown") == (failing != "nvmlInit_v2")

    def no_library(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(cuda_connections, "ctypes", SimpleNamespace(**vars(ctypes) | {"CDLL": no_library}))
    assert gpu_compute_capability_major() is None


@pytest.mark.parametrize(("engine", "sharded"), [("megatron", False), ("ddp", False), ("fsdp2", True), ("zero3", True)])
def test_a_run_sets_it_first(engine: str, sharded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the module that sets the device is imported."""
    seen: list[bool] = []

    class Stop(Exception):
        pass

    def record(environ: Any, layout: Layout, sharded_weights: bool) -> str:
        seen.append(sharded_weights)
        raise Stop

    monkeypatch.setattr(engines, "set_max_connections", record)
    with pytest.raises(Stop):
        engines.start_context(SwiftConfig(task="sft", model="m", engine=engine), Layout(world_size=1))
    assert seen == [sharded]
