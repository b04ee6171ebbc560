"""/sys/class/infiniband of machines made of files."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path

import pytest

from megaswift.diagnosis.infiniband import infiniband_findings, list_ports, may_lock_memory
from tests.diagnosis.fake_machine import machine, only, states, write_tree

UNLIMITED = resource.RLIM_INFINITY
ACTIVE = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
DOWN = ACTIVE | {"state": "1: DOWN", "phys_state": "3: Disabled", "rate": "10 Gb/sec (4X)"}
WAITING = ACTIVE | {"state": "2: INIT"}


def devices(root: Path, *ports: Mapping[str, str], usable: bool = True) -> None:
    for i, port in enumerate(ports):
        base = f"sys/class/infiniband/mlx5_{i}/ports/1"
        write_tree(root, {f"{base}/{name}": f"{text}\n" for name, text in port.items()})
    if usable:
        write_tree(root, {"dev/infiniband/uverbs0": "", "sys/module/nvidia_peermem/refcnt": "0"})


def test_none(tmp_path: Path) -> None:
    assert only(infiniband_findings(machine(tmp_path), 65536, True)).found.startswith("no devices")


def test_in_order(tmp_path: Path) -> None:
    devices(tmp_path, ACTIVE, ACTIVE)
    here = machine(tmp_path)
    assert [p.active for p in list_ports(here)] == [True, True]
    finding = only(infiniband_findings(here, UNLIMITED, True))
    assert finding.state == "ok" and "mlx5_1:1 ACTIVE 400 Gb/sec (4X NDR) InfiniBand" in finding.found


@pytest.mark.parametrize(("port", "fix"), [(DOWN, "cable"), (WAITING, "subnet manager")])
def test_no_active_port(port: dict, fix: str, tmp_path: Path) -> None:
    devices(tmp_path, port)
    finding = only(infiniband_findings(machine(tmp_path), UNLIMITED, False))
    assert finding.state == "problem" and port["state"].split(": ")[1] in finding.found and fix in finding.fix


def test_ports_that_differ(tmp_path: Path) -> None:
    devices(tmp_path, ACTIVE, ACTIVE | {"rate": "200 Gb/sec (4X HDR)"}, DOWN)
    found = list(infiniband_findings(machine(tmp_path), UNLIMITED, True))
    assert [f.state for f in found] == ["ok", "note", "note"] and all(f.fix for f in found[1:])
    assert "mlx5_2:1 DOWN" in found[1].found and "different rates" in found[2].found


def test_what_processes_need(tmp_path: Path) -> None:
    devices(tmp_path, ACTIVE, usable=False)
    found = states(infiniband_findings(machine(tmp_path), 65536, True))
    assert found == {"InfiniBand": "problem", "memlock": "problem", "GPUDirect RDMA": "note"}
    write_tree(
        tmp_path, {"dev/infiniband/uverbs0": "", "proc/self/status": "Name:\tpython\nCapEff:\t0000000000004000\n"}
    )
    here = machine(tmp_path)
    assert may_lock_memory(here) and states(infiniband_findings(here, 65536, False)) == {"InfiniBand": "ok"}
    write_tree(tmp_path, {"proc/self/status": "CapEff:\t000001ffffffbfff\n"})
    assert not may_lock_memory(here)
