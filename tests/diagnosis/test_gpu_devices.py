"""nvidia-smi's rows, from a program that prints them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megaswift.diagnosis.gpu_devices import FIELDS, GpuDevice, GpuListing, device_findings, gpu_findings, list_gpus
from tests.diagnosis.fake_machine import machine, only, put_program, write_tree

ROW = "0, NVIDIA H100 80GB HBM3, 570.133.20, 81559, 4, 0, Default, Disabled"
PAGE = "| NVIDIA-SMI 570.133.20     Driver Version: 570.133.20     CUDA Version: 12.8     |"
DEVICE = GpuDevice("0", "NVIDIA H100 80GB HBM3", 81559.0, 4.0, "0", "Default", "Disabled")


def nvidia_smi(folder: Path, rows: str = ROW, page: str = PAGE) -> None:
    """Answers the query with `rows`, other calls with `page`."""
    query = f"--query-gpu={','.join(FIELDS)} --format=csv,noheader,nounits"
    put_program(folder / "bin", "nvidia-smi", f"[ \"$*\" = '{query}' ] && echo '{rows}' || echo '{page}'")


def test_the_listing(tmp_path: Path) -> None:
    nvidia_smi(tmp_path)
    listing = list_gpus(machine(tmp_path))
    assert listing == GpuListing((DEVICE,), "570.133.20", "12.8")
    assert only(gpu_findings(listing, machine(tmp_path))).found == "1 x NVIDIA H100 80GB HBM3, 79.6 GiB"


def test_values_that_a_card_does_not_have(tmp_path: Path) -> None:
    nvidia_smi(tmp_path, "0, NVIDIA GeForce RTX 3090, 570.1, 24576, 1, [N/A], Default, [N/A]", "no version")
    listing = list_gpus(machine(tmp_path))
    assert listing.driver_cuda == "" and only(gpu_findings(listing, machine(tmp_path))).state == "ok"


@pytest.mark.parametrize(
    ("script", "told", "fix"),
    [
        (
            "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18",
            "mismatch",
            "restart the machine",
        ),
        (
            "echo 'NVIDIA-SMI has failed because it could not communicate with the driver'; exit 9",
            "has failed",
            "lsmod",
        ),
        ("exit 6", "exit code 6", "lsmod"),
    ],
)
def test_a_driver_that_does_not_answer(script: str, told: str, fix: str, tmp_path: Path) -> None:
    put_program(tmp_path / "bin", "nvidia-smi", script)
    finding = only(gpu_findings(list_gpus(machine(tmp_path)), machine(tmp_path)))
    assert finding.state == "problem" and told in finding.found and fix in finding.fix


def test_without_the_program(tmp_path: Path) -> None:
    here = replace(machine(tmp_path), environ={"PATH": str(tmp_path)})
    assert only(gpu_findings(list_gpus(here), here)).found == "no NVIDIA GPU"
    write_tree(tmp_path, {"proc/driver/nvidia/gpus/0000:1b:00.0/information": ""})
    assert only(gpu_findings(list_gpus(here), here)).state == "note"


def test_different_kinds(tmp_path: Path) -> None:
    listing = GpuListing((DEVICE, replace(DEVICE, index="1", name="NVIDIA A100")))
    finding = only(gpu_findings(listing, machine(tmp_path)))
    assert finding.state == "note" and "NVIDIA A100, NVIDIA H100" in finding.found
    assert only(gpu_findings(GpuListing(), machine(tmp_path))).found == "nvidia-smi lists no GPU"


@pytest.mark.parametrize(
    ("changed", "state", "told", "fix"),
    [
        ({"errors": "3"}, "problem", "3 uncorrected memory errors", "nvidia-smi -i 0 -r"),
        ({"compute_mode": "Prohibited"}, "problem", "no process can use it", "nvidia-smi -i 0 -c DEFAULT"),
        ({"used": 20480.0}, "note", "20.0 GiB of 79.6 GiB are in use", "lists the processes"),
        ({"mig": "Enabled"}, "note", "MIG", "disable MIG"),
    ],
)
def test_one_gpu(changed: dict, state: str, told: str, fix: str) -> None:
    assert list(device_findings(DEVICE)) == []
    finding = only(device_findings(replace(DEVICE, **changed)))
    assert (finding.name, finding.state) == ("GPU 0", state) and told in finding.found and fix in finding.fix
