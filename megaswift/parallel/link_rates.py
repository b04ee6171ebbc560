"""Figures of communication: bytes moved by each operation, and the rates of links by device name.

Owns the formulas of nccl-tests (its PERFORMANCE.md), the table of NVLink and PCIe rates and what a link allows a group
of ranks. Measuring is the engine's (`engine/diagnostics/communication_benchmark.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from megaswift.parallel.layout import Layout

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
LINK_RATES = {
    "H100 PCIe": 64.0,
    "H800 PCIe": 64.0,
    "A100-PCIE": 32.0,
    "A100 80GB PCIe": 32.0,
    "A800 80GB PCIe": 32.0,
    "GB200": 900.0,
    "GB300": 900.0,
    "B300": 900.0,
    "B200": 900.0,
    "GH200": 450.0,
    "H200": 450.0,
    "H100 NVL": 300.0,
    "H100": 450.0,
    "H800": 200.0,
    "H20": 450.0,
    "A100": 300.0,
    "A800": 200.0,
    "V100-SXM2": 150.0,
    "V100-SXM3": 150.0,
    "L40": 32.0,
    "L20": 32.0,
    "L4": 32.0,
    "RTX 3090": 32.0,
    "RTX 4090": 32.0,
    "RTX 5090": 64.0,
}
"""GB/s in one direction between two GPUs of a node, from the data sheets (which add both directions): NVLink where the
device has it, else PCIe with 16 lanes. The first name that the device's name contains counts. The NVLink bridge of PCIe
cards joins pairs only, so their PCIe rate stands here."""
INFINIBAND = Path("/sys/class/infiniband")


def bus_factor(operation: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth: what a rank's link carries for each byte of the operation's size."""
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return 1.0 if operation == "send_recv" else (ranks - 1) / ranks


def rounded_size(size: int, ranks: int, element: int) -> int:
    """The size in bytes that divides into equal parts of whole elements: at most `size`, at least one element each."""
    return max(size // (ranks * element), 1) * ranks * element


def link_rate_of_device(name: str) -> float | None:
    """GB/s of one direction between GPUs of a node; None where the device is not in the table."""
    return next((rate for known, rate in LINK_RATES.items() if known in name), None)


def infiniband_rate(folder: Path = INFINIBAND) -> float | None:
    """GB/s of this node's active ports of InfiniBand and RoCE together; None without one."""
    total = 0.0
    for port in sorted(folder.glob("*/ports/*")):
        try:
            active = "ACTIVE" in (port / "state").read_text()
            gigabits = float((port / "rate").read_text().split()[0])
        except (OSError, ValueError, IndexError):
            continue
        total += gigabits / 8 if active else 0.0
    return total or None


def hardware_figure(
    operation: str, nodes_of_ranks: Sequence[object], in_node: float | None, between_nodes: float | None
) -> float | None:
    """The highest bus bandwidth in GB/s that links allow a group; None where its links are not known.

    `nodes_of_ranks`: the node of each rank of the group. `in_node`, `between_nodes`: GB/s of one rank's link. A ring
    that leaves a node uses the links of all its ranks there; of an all-to-all only what leaves the node does.
    """
    counts = Counter(nodes_of_ranks)
    if len(counts) == 1:
        return in_node
    if between_nodes is None:
        return None
    ranks = len(nodes_of_ranks)
    together = max(counts.values())
    if operation == "send_recv":
        return between_nodes
    if operation == "all_to_all":
        return between_nodes * (ranks - 1) / (ranks - together)
    ring = between_nodes * together
    return min(ring, in_node) if in_node is not None and together > 1 else ring


def communication_groups(layout: Layout) -> dict[str, list[list[int]]]:
    """The groups of a layout by name, those of one rank left out. Names with the same ranks are joined: `dp world`."""
    found: dict[str, list[list[int]]] = {}
    for name in _axes(layout):
        groups = [list(range(layout.world_size))] if name == "world" else layout.groups(name)
        if len(groups[0]) == 1:
            continue
        same = next((known for known, others in found.items() if others == groups and known != "pp"), None)
        if same is None or name == "pp":
            found[name] = groups
        else:
            found = {f"{k} {name}" if k == same else k: v for k, v in found.items()}
    return found


def operations_of(group: str, operations: Sequence[str]) -> list[str]:
    """Pipeline stages send and receive only."""
    return [o for o in operations if group != "pp" or o == "send_recv"]


def _axes(layout: Layout) -> Iterator[str]:
    yield from ("tp", "cp", "dp")
    if layout.cp > 1:
        yield "dp-cp"
    yield "pp"
    if layout.ep > 1 or layout.etp > 1:
        yield from ("etp", "ep", "edp")
    yield "world"
