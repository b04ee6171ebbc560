"""Cores, memory, shared memory and ulimits, from files of /proc and /sys."""

from __future__ import annotations

import os
import resource
import subprocess
from pathlib import Path

import pytest

from megaswift.diagnosis.host_limits import (
    cpu_finding,
    cpu_quota,
    limit_findings,
    memory_finding,
    memory_limit,
    open_files_finding,
    shared_memory_finding,
    threads_finding,
)
from tests.diagnosis.fake_machine import machine, states, write_tree

MEMINFO = "MemTotal:       263000000 kB\nMemAvailable:   250000000 kB\n"
V2 = {"proc/self/cgroup": "0::/pod/run\n"}
V1 = {"proc/self/cgroup": "5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n"}


def test_limits_of_cgroup_v2(tmp_path: Path) -> None:
    write_tree(tmp_path, V2 | {"proc/meminfo": MEMINFO, "sys/fs/cgroup/pod/run/cpu.max": "max 100000"})
    here = machine(tmp_path)
    assert cpu_quota(here) is None and memory_limit(here) is None and memory_finding(here, 8).state == "ok"
    write_tree(tmp_path, {"sys/fs/cgroup/pod/cpu.max": "50000 100000", "sys/fs/cgroup/pod/memory.max": str(6 << 30)})
    assert cpu_quota(here) == 0.5 and memory_limit(here) == 6 << 30, "of the group above"
    cpu, memory = cpu_finding(here, 2), memory_finding(here, 2)
    assert cpu.state == memory.state == "note"
    assert "cgroup quota 0.5" in cpu.found and "for 2 processes" in cpu.found and "--cpus" in cpu.fix
    assert "limit of the cgroup 6.0 GiB" in memory.found and "--memory" in memory.fix
    assert memory_finding(here, 1).state == "ok"


def test_limits_of_cgroup_v1(tmp_path: Path) -> None:
    files = {"cpu/docker/x/cpu.cfs_quota_us": "150000", "cpu/docker/x/cpu.cfs_period_us": "100000"}
    files |= {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/docker/x/memory.limit_in_bytes": "1048576"}
    write_tree(tmp_path, V1 | {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert cpu_quota(machine(tmp_path)) == 1.5 and memory_limit(machine(tmp_path)) == 1 << 20
    write_tree(tmp_path, {"sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us": "-1"})
    assert cpu_quota(machine(tmp_path)) is None


def test_cores_of_this_process(tmp_path: Path) -> None:
    assert cpu_finding(machine(tmp_path), 1).state == "ok"
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        finding = cpu_finding(machine(tmp_path), 2)
    finally:
        os.sched_setaffinity(0, allowed)
    assert finding.state == "note" and finding.found.startswith("1 of ")


def mounted(path: Path, size: str) -> bool:
    path.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_small_shared_memory(tmp_path: Path) -> None:
    missing = shared_memory_finding(machine(tmp_path))
    assert missing.state == "problem" and "missing" in missing.found
    if not mounted(tmp_path / "dev/shm", "64m"):
        pytest.skip("needs root and a tmpfs")
    try:
        small = shared_memory_finding(machine(tmp_path))
    finally:
        subprocess.run(["umount", str(tmp_path / "dev/shm")], check=True)
    assert small.state == "problem" and small.found.startswith("64.0 MiB") and "--shm-size" in small.fix


def test_full_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "megaswift.diagnosis.host_limits.shutil.disk_usage"
    monkeypatch.setattr(module, lambda path: (64 << 30, 64 << 30, 1 << 20))
    finding = shared_memory_finding(machine(tmp_path))
    assert finding.state == "problem" and finding.found == "1.0 MiB of 64.0 GiB free" and "remove files" in finding.fix


@pytest.mark.parametrize(
    ("limits", "state"),
    [((1024, 4096), "note"), ((1024, resource.RLIM_INFINITY), "note"), ((65536, 65536), "ok"), ((-1, -1), "ok")],
)
def test_open_files(limits: tuple[int, int], state: str) -> None:
    finding = open_files_finding(limits)
    assert finding.state == state and ("ulimit -n 65536" in finding.fix) is (state == "note")


def test_threads(tmp_path: Path) -> None:
    """The smallest of the user's limit and the cgroups'; v1 has a hierarchy of its own."""
    here, unlimited = machine(tmp_path), resource.RLIM_INFINITY
    assert threads_finding(here, unlimited, 8).found == "unlimited"
    mine = threads_finding(here, 1024, 8)
    assert mine.state == "note" and mine.found == "1024 (ulimit -u): 8 training processes start about 2048"
    assert threads_finding(here, 1024, 2).state == "ok"
    write_tree(tmp_path, V2 | {"sys/fs/cgroup/pod/pids.max": "100\n", "sys/fs/cgroup/pod/run/pids.max": "max\n"})
    group = threads_finding(here, 1024, 1)
    assert group.found.startswith("100 (pids.max of the cgroup): a training process starts") and "podPids" in group.fix
    write_tree(tmp_path, {"proc/self/cgroup": "3:pids:/docker/x\n", "sys/fs/cgroup/pids/docker/x/pids.max": "5000\n"})
    assert (found := threads_finding(here, unlimited, 8)).state == "ok" and found.found == "5000"


def test_numa_and_the_whole_list(tmp_path: Path) -> None:
    write_tree(tmp_path, {"sys/devices/system/node/node0/cpulist": "", "sys/devices/system/node/node1/cpulist": ""})
    write_tree(tmp_path, {"proc/sys/kernel/numa_balancing": "1", "proc/meminfo": MEMINFO, "dev/shm/x": ""})
    assert states(limit_findings(machine(tmp_path), 1))["NUMA"] == "note"
    write_tree(tmp_path, {"proc/sys/kernel/numa_balancing": "0"})
    found = states(limit_findings(machine(tmp_path), 1))
    ulimits = ["open files (ulimit -n)", "threads (ulimit -u)"]
    assert list(found) == ["CPU cores", "memory", "/dev/shm", *ulimits, "NUMA"] and found["NUMA"] == "ok"
