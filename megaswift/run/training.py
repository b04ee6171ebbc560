"""One training run on a rank, from the configuration to the export: `preflight`, then `run_training`.

Owns the order of what happens and how a run ends; `build.py` makes the parts, `loop.py` trains. torch is imported when
`run_training` starts, so that a wrong command line is answered at once.
"""

from __future__ import annotations

import atexit
import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megaswift import log
from megaswift.base.user_code import CLOCK
from megaswift.config import SwiftConfig
from megaswift.engine.determinism import enable_determinism
from megaswift.engine.jit_fuser import choose_jit_fuser
from megaswift.engine.tf32 import set_tf32
from megaswift.error_exit import print_error_once
from megaswift.run.checks.preflight import preflight
from megaswift.trainers.interrupt import InterruptedBySignal

__all__ = ["preflight", "run_training"]


def run_training(cfg: SwiftConfig) -> Path:
    """Trains as `cfg` says and returns the output directory. Every rank calls it, after `preflight`."""
    began = time.perf_counter()

    # What holds for the whole process.
    log.quiet_libraries()
    CLOCK.limit(cfg.parallel.ddp_timeout, "--ddp_timeout", lambda error: print_error_once(error, os.environ))
    enable_determinism(cfg.train.deterministic, os.environ)
    set_tf32(cfg.train.tf32)
    choose_jit_fuser(cfg.model.jit_fuser)

    # torch, the engine's libraries, and the process groups.
    with gc_paused():
        from megaswift.run import build, course
        from megaswift.run.faults.diagnosis import lost_ranks_explained

        processes = build.join_processes(cfg)

    finished = False
    try:
        # What all ranks agree on, and the run itself.
        with lost_ranks_explained(cfg.parallel.ddp_timeout):
            with gc_paused():
                settled = build.settle(cfg, processes)
            root = course.run_to_the_end(settled, time.perf_counter() - began)
        finished = True
        if cfg.checkpoint.add_version:
            log.print_result(f"output folder: {root}")
        return root
    except InterruptedBySignal:
        finished = True  # on all ranks: threads of groups that stay open can abort the interpreter's end
        raise
    finally:
        # after an error other ranks may be inside a collective: the process ends instead
        if finished or processes.layout.world_size == 1:
            processes.context.close()


ALLOCATIONS = 50_000
"""New objects before the collector looks, in place of 700: enough for imports, and garbage of the data's preparation
still goes."""


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector in the block, and exempt objects made there: they live as long as the process."""
    before = gc.get_threshold()
    gc.set_threshold(ALLOCATIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.freeze()
        atexit.register(gc.unfreeze)  # else Triton reports the objects that the interpreter's end leaves as leaked
