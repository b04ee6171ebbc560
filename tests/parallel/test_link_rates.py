"""Figures of communication against values worked by hand from nccl-tests' PERFORMANCE.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaswift.parallel.layout import Layout
from megaswift.parallel.link_rates import (
    OPERATIONS,
    bus_factor,
    communication_groups,
    hardware_figure,
    infiniband_rate,
    link_rate_of_device,
    operations_of,
    rounded_size,
)


@pytest.mark.parametrize(
    ("operation", "of_2", "of_4", "of_8"),
    [
        ("all_reduce", 1.0, 1.5, 1.75),
        ("all_gather", 0.5, 0.75, 0.875),
        ("reduce_scatter", 0.5, 0.75, 0.875),
        ("all_to_all", 0.5, 0.75, 0.875),
        ("send_recv", 1.0, 1.0, 1.0),
    ],
)
def test_bus_factor(operation: str, of_2: float, of_4: float, of_8: float) -> None:
    assert [bus_factor(operation, n) for n in (2, 4, 8)] == [of_2, of_4, of_8]


def test_sizes_are_whole_elements_of_every_rank() -> None:
    assert rounded_size(1024, 4, 4) == 1024 and rounded_size(1000, 3, 4) == 996 and rounded_size(1, 8, 4) == 32


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("NVIDIA H100 80GB HBM3", 450.0),
        ("NVIDIA H100 PCIe", 64.0),
        ("NVIDIA H200", 450.0),
        ("NVIDIA H20", 450.0),
        ("NVIDIA H800", 200.0),
        ("NVIDIA A100-SXM4-80GB", 300.0),
        ("NVIDIA A100-PCIE-40GB", 32.0),
        ("NVIDIA A100 80GB PCIe", 32.0),
        ("NVIDIA L40S", 32.0),
        ("NVIDIA GB200", 900.0),
        ("CPU", None),
    ],
)
def test_link_rate_of_device(name: str, rate: float | None) -> None:
    assert link_rate_of_device(name) == rate


def test_active_ports_are_added_up(tmp_path: Path) -> None:
    assert infiniband_rate(tmp_path) is None
    ports = [("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)"), ("mlx5_1", "4: ACTIVE", "200 Gb/sec (4X HDR)")]
    for name, state, rate in [*ports, ("mlx5_2", "1: DOWN", "40 Gb/sec (4X QDR)")]:
        folder = tmp_path / name / "ports" / "1"
        folder.mkdir(parents=True)
        (folder / "state").write_text(state)
        (folder / "rate").write_text(rate)
    assert infiniband_rate(tmp_path) == 75.0


def test_hardware_figure() -> None:
    """Two nodes of eight GPUs: 450 GB/s within a node, 50 GB/s between nodes for each GPU."""
    whole, pair = ["a"] * 8 + ["b"] * 8, ["a", "b"]
    assert hardware_figure("all_reduce", ["a"] * 8, 450.0, 50.0) == 450.0
    assert hardware_figure("all_reduce", whole, 450.0, 50.0) == 400.0, "a ring has the links of 8 GPUs"
    assert hardware_figure("all_reduce", whole, 300.0, 50.0) == 300.0, "and no more than within a node"
    assert hardware_figure("all_reduce", pair, 450.0, 50.0) == 50.0
    assert hardware_figure("send_recv", whole, 450.0, 50.0) == 50.0
    assert hardware_figure("all_to_all", whole, 450.0, 50.0) == 93.75, "8 of 15 messages leave the node"
    assert hardware_figure("all_reduce", whole, 450.0, None) is None
    assert hardware_figure("all_reduce", ["a"] * 2, None, 50.0) is None


def test_groups_of_a_layout() -> None:
    found = communication_groups(Layout(8, tp=2, pp=2))
    assert found == {
        "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "dp": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "pp": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "world": [list(range(8))],
    }
    assert list(communication_groups(Layout(4))) == ["dp world"]
    assert list(communication_groups(Layout(4, cp=2))) == ["cp", "dp", "dp-cp world"]
    assert communication_groups(Layout(4, ep=2)) == {
        "dp world": [[0, 1, 2, 3]],
        "ep": [[0, 1], [2, 3]],
        "edp": [[0, 2], [1, 3]],
    }
    assert communication_groups(Layout(2, pp=2)) == {"pp": [[0, 1]], "world": [[0, 1]]}


def test_pipeline_stages_only_send_and_receive() -> None:
    assert operations_of("pp", OPERATIONS) == ["send_recv"] and operations_of("tp", OPERATIONS) == list(OPERATIONS)
    assert operations_of("pp", ["all_reduce"]) == []
