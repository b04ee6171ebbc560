"""The process group and random states of a run without model parallelism."""

from __future__ import annotations

import os
import random
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

from megaswift.engine import process_group
from megaswift.parallel.layout import Layout


class TorchContext:
    """All processes of a run as data-parallel ranks. Made once a process; `close` before another is made."""

    def __init__(self, layout: Layout, timeout_s: float = 600.0, seed: int = 42) -> None:
        self.layout = layout
        self.rank = int(os.environ.get("RANK", "0"))
        world = int(os.environ.get("WORLD_SIZE", "1"))
        layout.check_processes(world)
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        process_group.init_default_and_gloo_process_groups("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout_s)
        self.coordinates = layout.coordinates(self.rank)
        self.groups = SimpleNamespace(dp=dist.group.WORLD)
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Random states for dropout; every rank draws other numbers. Weights never come from these."""
        rank_seed = seed + 10_000 * self.rank
        torch.manual_seed(rank_seed)
        np.random.seed(rank_seed % 2**32)
        random.seed(rank_seed)

    def close(self) -> None:
        """Take the process group down."""
        if dist.is_initialized():
            dist.destroy_process_group()
