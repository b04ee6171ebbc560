"""CPU cores, memory and limits of this process: cgroups, affinity, ulimits, shared memory, NUMA."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator

from megaswift.base.byte_size import bytes_text
from megaswift.diagnosis.finding import Finding
from megaswift.diagnosis.machine import Machine

SMALLEST_SHM = 1 << 30
"""Docker gives 64 MiB; NCCL and data workers use some 100 MiB for each process."""
FEWEST_FILES = 4096
PROCESS_THREADS = 256
"""Estimated threads of a training process: autograd, OpenMP, NCCL, data loading. These limits count threads."""
PROCESS_MEMORY = 4 << 30
"""CPU memory of a process that trains a small model on a GPU: libraries and pinned buffers."""
UNLIMITED_MEMORY = 1 << 60
"""cgroup v1 writes a number near 2^63 where there is no limit."""


def limit_findings(machine: Machine, processes: int) -> Iterator[Finding]:
    """`processes`: of a run on this machine."""
    yield cpu_finding(machine, processes)
    yield memory_finding(machine, processes)
    yield shared_memory_finding(machine)
    yield open_files_finding(resource.getrlimit(resource.RLIMIT_NOFILE))
    own = resource.RLIM_INFINITY if os.geteuid() == 0 else resource.getrlimit(resource.RLIMIT_NPROC)[0]  # not for root
    yield threads_finding(machine, own, processes)
    nodes = [name for name in machine.folders("sys/devices/system/node") if name.removeprefix("node").isdigit()]
    if nodes:
        balancing = machine.read("proc/sys/kernel/numa_balancing")
        if len(nodes) > 1 and balancing not in ("", "0"):
            fix = "run sysctl kernel.numa_balancing=0 as root"
            found = f"{len(nodes)} NUMA nodes with automatic balancing, which moves pages during a run"
            yield Finding("NUMA", "note", found, fix)
        else:
            yield Finding("NUMA", "ok", f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}")


def cgroup_files(machine: Machine, controller: str, v2: str, v1: str) -> Iterator[str]:
    """Contents of a file in this process's cgroup and those above it; in a container the root is its own."""
    for line in machine.read("proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        base, file = ("sys/fs/cgroup", v2) if names == "" else (f"sys/fs/cgroup/{controller}", v1)
        if names and controller not in names.split(","):
            continue
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            if text := machine.read("/".join([base, *parts[:depth], file])):
                yield text


def cpu_quota(machine: Machine) -> float | None:
    """CPUs that the cgroup gives this process; None: no limit."""
    found = []
    for text in cgroup_files(machine, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        words = text.split()
        period = words[1] if len(words) > 1 else next(cgroup_files(machine, "cpu", "", "cpu.cfs_period_us"), "100000")
        if words[0].isdigit() and int(words[0]) > 0 and int(period) > 0:
            found.append(int(words[0]) / int(period))
    return min(found, default=None)


def memory_limit(machine: Machine) -> int | None:
    """Bytes that the cgroup gives this process; None: no limit."""
    texts = cgroup_files(machine, "memory", "memory.max", "memory.limit_in_bytes")
    return min((int(t) for t in texts if t.isdigit() and int(t) < UNLIMITED_MEMORY), default=None)


def cpu_finding(machine: Machine, processes: int) -> Finding:
    """Cores that this process may use, beside those of the machine and the processes of a run."""
    cores = os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0))
    quota = cpu_quota(machine)
    usable = min(affinity, quota or affinity)
    found = f"{usable:g} of {cores}" + (f" (cgroup quota {quota:g})" if quota and quota < affinity else "")
    if usable < processes:
        fix = "give the container or job at least one core for each process (docker --cpus, Slurm --cpus-per-task)"
        return Finding("CPU cores", "note", f"{found} for {processes} processes", fix)
    return Finding("CPU cores", "ok", found)


def memory_finding(machine: Machine, processes: int) -> Finding:
    """Memory that is available, and the limit of the cgroup."""
    facts = dict(line.split(":", 1) for line in machine.read("proc/meminfo").splitlines() if ":" in line)
    total, available = (int(facts.get(name, "0").split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit = memory_limit(machine)
    found = f"{bytes_text(available)} of {bytes_text(total)} available"
    if limit is not None and limit < total:
        found += f"; limit of the cgroup {bytes_text(limit)}"
    if min(limit or total, total) < PROCESS_MEMORY * processes:
        fix = "use fewer processes, or raise the limit of the container or job (docker --memory, Slurm --mem)"
        return Finding("memory", "note", f"{found}; {processes} processes load models through it", fix)
    return Finding("memory", "ok", found)


def shared_memory_finding(machine: Machine) -> Finding:
    """/dev/shm, by which processes of a machine exchange data."""
    path = machine.path("dev/shm")
    fix = "docker run --shm-size 16g (or --ipc host); on Kubernetes shared_memory in clusters.yaml"
    try:
        total, _, free = shutil.disk_usage(path)
    except OSError:
        return Finding("/dev/shm", "problem", "missing: NCCL and data workers fail", f"mount a tmpfs there; {fix}")
    if total < SMALLEST_SHM:
        found = f"{bytes_text(total)}: NCCL and data workers run out of it (bus errors)"
        return Finding("/dev/shm", "problem", found, fix)
    if free < SMALLEST_SHM:
        fix = "remove files that ended processes left in /dev/shm"
        return Finding("/dev/shm", "problem", f"{bytes_text(free)} of {bytes_text(total)} free", fix)
    return Finding("/dev/shm", "ok", f"{bytes_text(free)} of {bytes_text(total)} free")


def open_files_finding(limits: tuple[int, int]) -> Finding:
    """`limits`: soft and hard."""
    soft, hard = limits
    if soft != resource.RLIM_INFINITY and soft < FEWEST_FILES:
        found = (
            f"{soft} (hard limit {'none' if hard == resource.RLIM_INFINITY else hard}): connections between ranks, data"
        )
        found += " workers and files of checkpoints may need more"
        fix = "ulimit -n 65536; nofile in /etc/security/limits.conf; docker run --ulimit nofile=65536"
        return Finding("open files (ulimit -n)", "note", found, fix)
    return Finding("open files (ulimit -n)", "ok", "unlimited" if soft == resource.RLIM_INFINITY else str(soft))


def threads_finding(machine: Machine, own: int, processes: int) -> Finding:
    """Threads that the user (`own`, the soft limit of `ulimit -u`) and the cgroups let a run start."""
    name = "threads (ulimit -u)"
    limits = [own] if own != resource.RLIM_INFINITY else []
    limits += [int(t) for t in cgroup_files(machine, "pids", "pids.max", "pids.max") if t.strip().isdigit()]
    if not limits:
        return Finding(name, "ok", "unlimited")
    if min(limits) < PROCESS_THREADS * processes:
        which = "ulimit -u" if min(limits) == own else "pids.max of the cgroup"
        run = "a training process starts" if processes == 1 else f"{processes} training processes start"
        found = f"{min(limits)} ({which}): {run} about {PROCESS_THREADS * processes}"
        fix = "ulimit -u 65536; nproc in /etc/security/limits.conf; docker run --pids-limit -1"
        return Finding(name, "note", found, f"{fix}; on Kubernetes the kubelet's podPidsLimit")
    return Finding(name, "ok", str(min(limits)))
