"""How the GPUs of a machine are connected: the matrix of `nvidia-smi topo -m`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megaswift.diagnosis.finding import Finding
from megaswift.diagnosis.gpu_devices import LIMIT_S
from megaswift.diagnosis.machine import Machine

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
ROUTES = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "a PCIe host bridge",
    "NODE": "the host bridges of one NUMA node",
    "SYS": "the link between CPU sockets",
}
"""Connections that are not NVLink, the fastest first."""


def parse_topology(text: str) -> dict[tuple[str, str], str]:
    """(Row, column) to connection, each pair of devices once: ("GPU0", "GPU1"): "NV18"."""
    rows = [ESCAPE.sub("", line).split() for line in text.splitlines()]
    header = next((row for row in rows if row[:1] == ["GPU0"] and "X" not in row), [])
    columns = [name for name in header if re.fullmatch(r"GPU\d+|NIC\d+|mlx\d+_\d+", name)]
    links: dict[tuple[str, str], str] = {}
    for row in rows:
        if row and row is not header and row[0] in columns and len(row) > len(columns):
            for name, link in zip(columns, row[1:], strict=False):
                if link != "X" and (name, row[0]) not in links:
                    links[row[0], name] = link
    return links


def topology_findings(machine: Machine) -> Iterator[Finding]:
    """NVLink between the GPUs; nothing on a machine with less than two."""
    done = machine.program(["nvidia-smi", "topo", "-m"], LIMIT_S)
    if done is None or done.code:
        return
    links = {pair: link for pair, link in parse_topology(done.text).items() if all(n.startswith("GPU") for n in pair)}
    if not links:
        return
    slow = {pair: link for pair, link in links.items() if not link.startswith("NV")}
    if not slow:
        kinds = ", ".join(sorted(set(links.values())))
        yield Finding("NVLink", "ok", f"{kinds} between all GPUs")
        return
    worst = max(slow.values(), key=lambda link: list(ROUTES).index(link) if link in ROUTES else -1)
    route = f"{worst} ({ROUTES[worst]})" if worst in ROUTES else worst
    first, second = next(pair for pair, link in slow.items() if link == worst)
    if len(slow) == len(links):
        found = f"none; the slowest connection is {route}, {first} - {second}"
        fix = "prefer pipeline and data parallelism to tensor parallelism, which exchanges activations in every layer"
    else:
        found = f"between {len(links) - len(slow)} of {len(links)} pairs of GPUs; {first} - {second}: {route}"
        fix = "keep tensor parallelism within GPUs that NVLink connects: order them with CUDA_VISIBLE_DEVICES"
    yield Finding("NVLink", "note", found, fix)
