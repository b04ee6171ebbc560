"""`nvidia-smi topo -m`, from matrices in its format."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaswift.diagnosis.gpu_topology import parse_topology, topology_findings
from tests.diagnosis.fake_machine import machine, only, put_program

LEGEND = "\n\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe\n  NV#  = Connection of NVLinks\n"
ALL = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tPXB\t0-51,104-155\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tSYS\t0-51,104-155\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tSYS\t52-103\t1\t\tN/A
NIC0\tPXB\tSYS\tSYS\t X \t\t\t\t
"""
NONE = """\
\tGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity
GPU0\t X \tPHB\tSYS\t0-31\t0
GPU1\tPHB\t X \tSYS\t0-31\t0
GPU2\tSYS\tSYS\t X \t32-63\t1
"""
PAIRS = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity
GPU0\t X \tNV4\tPXB\tSYS\t0-31
GPU1\tNV4\t X \tNODE\tPXB\t0-31
GPU2\tPXB\tNODE\t X \tNV4\t0-31
GPU3\tSYS\tPXB\tNV4\t X \t0-31
"""


def test_the_matrix() -> None:
    links = parse_topology(ALL + LEGEND)
    assert links == {
        ("GPU0", "GPU1"): "NV18",
        ("GPU0", "GPU2"): "NV18",
        ("GPU0", "NIC0"): "PXB",
        ("GPU1", "GPU2"): "NV18",
        ("GPU1", "NIC0"): "SYS",
        ("GPU2", "NIC0"): "SYS",
    }
    assert parse_topology("Failed to initialize NVML") == {}


@pytest.mark.parametrize(
    ("matrix", "state", "told", "fix"),
    [
        (ALL, "ok", "NV18 between all GPUs", ""),
        (NONE, "note", "none; the slowest connection is SYS (the link between CPU sockets), GPU0 - GPU2", "pipeline"),
        (PAIRS, "note", "between 2 of 6 pairs of GPUs; GPU0 - GPU3: SYS", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_findings(matrix: str, state: str, told: str, fix: str, tmp_path: Path) -> None:
    (tmp_path / "matrix").write_text(matrix + LEGEND)
    put_program(tmp_path / "bin", "nvidia-smi", f'[ "$*" = "topo -m" ] && cat {tmp_path}/matrix')
    finding = only(topology_findings(machine(tmp_path)))
    assert finding.state == state and told in finding.found and fix in finding.fix


@pytest.mark.parametrize("script", ["exit 3", "printf '\\tGPU0\\tCPU Affinity\\nGPU0\\t X \\t0-31\\n'"])
def test_nothing_to_say(script: str, tmp_path: Path) -> None:
    put_program(tmp_path / "bin", "nvidia-smi", script)
    assert list(topology_findings(machine(tmp_path))) == []
