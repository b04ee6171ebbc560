"""All-to-all exchanges between ranks of one machine through shared memory.

gloo sends every message through a socket, and a thread of its own wakes the receiver: where more ranks than cores share
a machine, that is nearly all the time there is (8 ranks on 2 cores, 8 kB to each: 9.4 ms; here 0.6 ms). Each rank has
two slots, which it writes in turns and all others read. A rank that begins turn t + 1 has read all of turn t, so the
slot of turn t is free at t + 2, when all have begun t + 1. The memory has no name and is gone with its last process,
however that ends.

Owns the memory and the waiting; which tensors travel, and what becomes of them, belongs to
`collectives.py`. Writes become visible in their order on x86-64 only: elsewhere, over several
machines or without Linux, there is no exchange and gloo carries everything. (memcpy's stores past the cache are fenced
by the C library.)
"""

from __future__ import annotations

import mmap
import os
import platform
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import DistBackendError
from torch.profiler import record_function

SLOT = 1 << 22
"""Bytes that a rank sends at a time, a multiple of any element; only those that are written take memory."""
LINE = 8
"""Words of a cache line: turns that ranks wait for lie on lines of their own."""
YIELDS = 200
"""Times that a waiting rank lets others go first before it sleeps."""
NAP = 5e-5
"""Seconds of a waiting rank's first sleep; each further sleep is twice as long."""
LONGEST_NAP = 2e-3
"""Maximum seconds of a sleep."""
LOOK = 1.0
"""Seconds between looks at whether the ranks that are waited for live."""


def machine_and_pid_namespace_id() -> int:
    """A number that processes share when they can share memory; 0 where none can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return 0
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        return 1 + zlib.crc32(boot + str(os.stat("/proc/self/ns/pid").st_ino).encode())
    except OSError:
        return 0


class SharedMemoryAllToAll:
    """The slots of one group, as this rank sees them."""

    def __init__(self, memory: mmap.mmap, rank: int, pids: Sequence[int], timeout_s: float) -> None:
        self._rank = rank
        self._pids = pids
        self._timeout = timeout_s
        self._turn = 0
        ranks = len(pids)
        head = _head(len(pids))
        self._turns = memoryview(memory)[:head].cast("q")
        self._sizes = self._turns[ranks * LINE :]
        slots = torch.frombuffer(memory, dtype=torch.uint8, offset=head)
        self._slots = [
            [slots[offset : offset + SLOT] for offset in range(half, len(slots), 2 * SLOT)] for half in (0, SLOT)
        ]

    def __call__(self, sent: Tensor, counts: Sequence[int]) -> list[tuple[Tensor, int]] | None:
        """What each rank sent (a vector, to be read before the next turn) and where this rank's part of it begins.

        `sent`: a vector, `counts` its elements for each rank in turn. None, on every rank, where one of them sends more
        than a slot holds. DistBackendError when a rank has ended or does not come within the group's timeout.
        """
        self._turn += 1
        half = self._turn % 2
        ranks = len(self._pids)
        size = sent.numel() * sent.element_size()
        table = self._table(half, self._rank)
        self._sizes[table] = size
        self._sizes[table + 1] = 0
        for i, count in enumerate(counts):
            self._sizes[table + 2 + i] = self._sizes[table + 1 + i] + count
        if size <= SLOT:
            self._slots[half][self._rank][:size].copy_(sent.view(torch.uint8))
        self._turns[self._rank * LINE] = self._turn  # last: who sees it sees the rest
        with record_function("shared_memory_all_to_all: wait"):  # for --profile
            for rank in range(ranks):
                self._await(rank)
        sizes = [self._sizes[self._table(half, rank)] for rank in range(ranks)]
        if max(sizes) > SLOT:
            return None
        offsets = [self._sizes[self._table(half, rank) + 1 + self._rank] for rank in range(ranks)]
        return [
            (slot[:n].view(sent.dtype), offset)
            for slot, n, offset in zip(self._slots[half], sizes, offsets, strict=True)
        ]

    def _table(self, half: int, rank: int) -> int:
        """Where a rank's size in bytes lies, and after it the first element for each rank."""
        return (half * len(self._pids) + rank) * (len(self._pids) + 2)

    def _await(self, rank: int) -> None:
        """Until `rank` has begun this turn."""
        word = rank * LINE
        turn = self._turn
        nap = NAP
        for _ in range(YIELDS):
            if self._turns[word] >= turn:
                return
            os.sched_yield()
        began = looked = time.monotonic()
        while self._turns[word] < turn:
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP)
            now = time.monotonic()
            if now - looked > LOOK:
                looked = now
                self._look_after(rank, now - began)

    def _look_after(self, rank: int, waited: float) -> None:
        try:
            os.kill(self._pids[rank], 0)
        except ProcessLookupError:
            raise DistBackendError(
                f"rank {rank} of a group of {len(self._pids)} has ended (process {self._pids[rank]})"
            ) from None
        if waited > self._timeout:
            raise DistBackendError(
                f"timed out after {waited:.0f} s waiting for rank {rank} of a group of {len(self._pids)} "
                "(--ddp_timeout)"
            )


def _head(ranks: int) -> int:
    """Bytes before the slots: whose turn it is, and the tables of both halves."""
    return -(-8 * ranks * (LINE + 2 * (ranks + 2)) // mmap.PAGESIZE) * mmap.PAGESIZE


def open_shared_memory_all_to_all(
    rank: int, ranks: int, timeout_s: float, gather: Callable[[list[int]], list[list[int]]]
) -> SharedMemoryAllToAll | None:
    """The exchange of a group of which this is `rank`, or None, on every rank, where it cannot be. Collective.

    `gather`: some numbers of this rank to those of all, by whatever means.
    """
    machine_id = machine_and_pid_namespace_id()
    file = -1
    memory = None
    length = _head(ranks) + 2 * ranks * SLOT
    if rank == 0 and machine_id:
        file = os.memfd_create("megaswift", os.MFD_CLOEXEC)
        os.ftruncate(file, length)
    members = gather([machine_id, os.getpid(), file])
    if machine_id and all(machine == machine_id for machine, _, _ in members):
        with suppress(OSError):  # /proc may be closed to other processes, even of the same user
            shared = os.open(f"/proc/{members[0][1]}/fd/{members[0][2]}", os.O_RDWR | os.O_CLOEXEC)
            with os.fdopen(shared, "r+b", buffering=0):
                memory = mmap.mmap(shared, length)
    ready = gather([memory is not None])
    if file >= 0:
        os.close(file)
    if memory is None or not all(ok for (ok,) in ready):
        return None
    return SharedMemoryAllToAll(memory, rank, [pid for _, pid, _ in members], timeout_s)
