"""Figures of communication: bytes moved by each operation, and what links allow a group of ranks.

Owns the formulas of nccl-tests (its PERFORMANCE.md) and what a link allows a group of ranks; the rates of NVLink and
PCIe are in `hardware.py`. Measuring is the engine's (`engine/diagnostics/communication_benchmark.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from megaswift.parallel.hardware import gpu_of_device
from megaswift.parallel.layout import Layout

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
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
    gpu = gpu_of_device(name)
    return None if gpu is None else gpu.link_gbs


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
