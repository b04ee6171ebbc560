"""Processes for tests that end ranks themselves: forked from a server that has imported torch and has no threads.

A fork of the test process can inherit a lock that another thread holds, and hang; it also keeps the test process'
sockets open.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path

import torch.distributed as dist

PRELOAD = [
    "torch",
    "torch.distributed",
    "megaswift.run.faults.diagnosis",
    "megaswift.engine.process_group",
]


def rank_context() -> ForkServerContext:
    """The start method; the server starts with the first process and ends with the test process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def run_ranks(rank: Callable[[int, int, Path], None], count: int, folder: Path) -> None:
    """Calls `rank(number, port, folder)` in `count` processes at once; a store listens on the port meanwhile."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [rank_context().Process(target=rank, args=(number, server.port, folder)) for number in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
