"""One training run on a rank, from the configuration to the export: `preflight`, then `run_training`.

Owns the order of the parts and how a run ends. The parts are made in `build`, the loop is `loop`, the end is `finish`.
torch is imported when `run_training` starts, so that a wrong command line is answered at once.
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
from megaswift.config import SwiftConfig
from megaswift.engine.determinism import enable_determinism
from megaswift.engine.jit_fuser import choose_jit_fuser
from megaswift.engine.tf32 import set_tf32
from megaswift.error_exit import print_error_once
from megaswift.folders.source import locate_model
from megaswift.parallel.layout_checks import legal_layout
from megaswift.parallel.layout_constraints_of_model_and_batch import LayoutRequest
from megaswift.parallel.model_shape import ModelShape
from megaswift.trainers.fit_to_device import fit_to_device
from megaswift.trainers.interrupt import InterruptedBySignal
from megaswift.trainers.oom_retry import config_of_retry
from megaswift.trainers.preflight import preflight
from megaswift.trainers.task_model_spec import model_spec_for_task
from megaswift.user_code_errors import CLOCK

__all__ = ["preflight", "run_training"]


def run_training(cfg: SwiftConfig) -> Path:
    """Trains as `cfg` says and returns the output directory. Every rank calls it, after `preflight`."""
    began = time.perf_counter()
    log.quiet_libraries()
    CLOCK.limit(cfg.parallel.ddp_timeout, "--ddp_timeout", lambda error: print_error_once(error, os.environ))
    enable_determinism(cfg.train.deterministic, os.environ)
    set_tf32(cfg.train.tf32)
    choose_jit_fuser(cfg.model.jit_fuser)
    with gc_paused():
        from megaswift.trainers.agreement_of_ranks_at_start import (
            program_and_device_facts,
            refuse_ranks_that_differ,
            refuse_ranks_with_other_options,
        )
        from megaswift.trainers.create_process_groups_and_engine import start_context
        from megaswift.trainers.output_version import (
            config_of_new_version,
            config_of_started_version,
            names_of_all_ranks,
            run_names,
        )
        from megaswift.trainers.session import TrainingSession
        from megaswift.trainers.verify_checkpoint_hashes_split_over_ranks import verify_sources_and_locate_model

        folder = locate_model(cfg.model, weights=not cfg.model.random_init, verify=False)
        spec = model_spec_for_task(cfg, folder)
        layout = legal_layout(ModelShape.of(spec), requested_layout(cfg))
        context = start_context(cfg, layout)
    finished = False
    adds_version = cfg.train.add_version
    try:
        with gc_paused():
            names = names_of_all_ranks(run_names(cfg, os.environ))
            cfg = config_of_started_version(cfg, names, os.environ)
            cfg = config_of_retry(cfg, os.environ)
            if layout.world_size > 1:
                refuse_ranks_that_differ(program_and_device_facts(folder, context.device))
            refuse_ranks_with_other_options(cfg)
            intact = verify_sources_and_locate_model(cfg, folder)
            spec = spec if intact == folder else model_spec_for_task(cfg, intact)
            cfg, fit = fit_to_device(cfg, spec, layout)
            session = TrainingSession(config_of_new_version(cfg), spec, intact, context, names)
            session.build.fit = fit
        session.seconds["start-up"] = time.perf_counter() - began
        root = session.run()
        finished = True
        if adds_version:
            log.print_result(f"output folder: {root}")
        return root
    except InterruptedBySignal:
        finished = True  # on all ranks: threads of groups that stay open can abort the interpreter's end
        raise
    except RuntimeError as error:
        from megaswift.trainers import failed_collective_diagnosis_and_stacks

        if not failed_collective_diagnosis_and_stacks.is_lost_rank_error(error):
            raise
        raise failed_collective_diagnosis_and_stacks.explain_lost_rank(error, cfg.parallel.ddp_timeout) from error
    finally:
        # after an error other ranks may be inside a collective: the process ends instead
        if finished or layout.world_size == 1:
            context.close()


def requested_layout(cfg: SwiftConfig) -> LayoutRequest:
    """The layout that a run asks for on the processes that its launcher started."""
    return LayoutRequest.of(cfg.parallel, int(os.environ.get("WORLD_SIZE", "1")), cfg.data.max_length, cfg.train)


ALLOCATIONS = 50_000
"""New objects before the collector looks, in place of 700: enough for imports, and garbage of the data's preparation
still goes."""


@contextmanager
def gc_paused() -> Iterator[None]:
    """Objects made inside are taken to live as long as the process: the collector does not visit them later either."""
    before = gc.get_threshold()
    gc.set_threshold(ALLOCATIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.freeze()
        atexit.register(gc.unfreeze)  # else Triton reports the objects that the interpreter's end leaves as leaked
