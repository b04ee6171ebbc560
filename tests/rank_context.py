"""Processes for tests that end ranks themselves: forked from a server that has imported torch and has no threads.

A fork of the test process can inherit a lock that another thread holds, and hang; it also keeps the test process'
sockets open.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

PRELOAD = [
    "torch",
    "torch.distributed",
    "megaswift.trainers.failed_collective_diagnosis_and_stacks",
    "megaswift.engine.start_default_process_group",
]


def rank_context() -> ForkServerContext:
    """The start method; the server starts with the first process and ends with the test process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context
