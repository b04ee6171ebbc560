"""torch against driver, GPUs and NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaswift.diagnosis.gpu_devices import GpuDevice, GpuListing
from megaswift.diagnosis.installed import Software
from megaswift.diagnosis.torch_build import runs_on, torch_findings
from tests.diagnosis.fake_machine import only, put_distribution

H100 = {"name": "NVIDIA H100", "memory": 80 << 30, "capability": [9, 0]}
CUDA = {
    "version": "2.9.0+cu128",
    "cuda": "12.8",
    "cxx11_abi": True,
    "cuda_available": True,
    "nccl": "2.27.5",
    "architectures": ["sm_80", "sm_90"],
    "devices": [H100],
}
LISTING = GpuListing((GpuDevice("0", "NVIDIA H100", 81559, 0, "0", "Default", "Disabled"),), "570.1", "12.8")


def findings(listing: GpuListing = LISTING, **changed: object) -> list:
    return list(torch_findings(Software({}, {**CUDA, **changed}, {"torch": ""}), listing))


def test_a_machine_in_order() -> None:
    assert [(f.name, f.state) for f in findings()] == [("torch", "ok"), ("NCCL", "ok")]
    assert "driver 570.1" in findings()[0].found


@pytest.mark.parametrize(
    ("listing", "changed", "told", "fix"),
    [
        (LISTING, {"cuda": None}, "without CUDA, although nvidia-smi lists 1 GPUs", "for this driver's CUDA"),
        (
            GpuListing(LISTING.devices, "535.1", "12.2"),
            {"cuda": "13.0", "cuda_available": False},
            "driver 535.1 supports CUDA up to 12.2",
            "update the driver",
        ),
        (LISTING, {"cuda_available": False}, "sees none of the 1 GPUs", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_torch_that_cannot_use_the_gpus(listing: GpuListing, changed: dict, told: str, fix: str) -> None:
    first = findings(listing, **changed, nccl=None, devices=[], architectures=[])[0]
    assert first.state == "problem" and told in first.found and fix in first.fix


def test_a_gpu_without_kernels() -> None:
    device = {"name": "NVIDIA B200", "memory": 1, "capability": [10, 0]}
    finding = next(f for f in findings(devices=[device]) if f.state == "problem")
    assert "NVIDIA B200 has capability 10.0" in finding.found and "sm_80, sm_90" in finding.found and finding.fix


@pytest.mark.parametrize(
    ("architecture", "capability", "runs"),
    [
        ("sm_80", (8, 6), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("compute_80", (9, 0), True),
        ("compute_90", (8, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_100a", (10, 3), False),
        ("sm_120", (12, 0), True),
        ("gfx942", (9, 4), False),
    ],
)
def test_binary_compatibility(architecture: str, capability: tuple[int, int], runs: bool) -> None:
    assert runs_on([architecture], *capability) is runs


def test_another_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_distribution(tmp_path, "nvidia-nccl-cu12", "2.27.5")
    monkeypatch.syspath_prepend(tmp_path)
    assert findings()[-1].state == "ok"
    finding = findings(nccl="2.18.1")[-1]
    assert finding.state == "note" and "loads 2.18.1" in finding.found and "LD_LIBRARY_PATH" in finding.fix


def test_torch_missing_or_broken() -> None:
    assert only(torch_findings(Software({}), LISTING)).found == "not installed"
    broken = only(torch_findings(Software({}, {}, {"torch": "ended with SIGILL"}), LISTING))
    assert broken.state == "problem" and "SIGILL" in broken.found
