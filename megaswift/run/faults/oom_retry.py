"""`--oom_retry`: after an out-of-memory error a run is started once more with a smaller micro-batch and the same global
batch.

The file OUT/oom_retry.json carries the micro-batch to the next attempt. An error is retried only where something starts
the processes again: this toolkit's launcher, torchrun with --max-restarts, or this very process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from megaswift import log
from megaswift.base.atomic_writes import write_atomically
from megaswift.config import SwiftConfig
from megaswift.errors import EXIT_OOM_RETRY, ConfigError, Problem, UserError
from megaswift.launchers.options.variables import OOM_RETRY, restart_count
from megaswift.trainers.options.batch_sizes import batch_plan

FILE = "oom_retry.json"


class OutOfMemoryRetry(UserError):
    """Out of memory; the next attempt has a smaller micro-batch."""

    title = "out of memory, starting again with a smaller micro-batch"
    exit_code = EXIT_OOM_RETRY
    rank0_may_print = False


def smaller_microbatch(cfg: SwiftConfig, dp: int) -> SwiftConfig | None:
    """Return the configuration with the largest micro-batch of at most half the rows that divides a data-parallel
    rank's share of the global batch; None where there is none."""
    plan = batch_plan(cfg.train, dp)
    rows = plan.per_device * plan.accumulation
    for per_device in range(plan.per_device // 2, 0, -1):
        if rows % per_device == 0:
            try:
                return _with_microbatch(cfg, per_device, plan.global_batch_size)
            except ConfigError:  # a task that needs several rows together
                continue
    return None


def _with_microbatch(cfg: SwiftConfig, per_device: int, global_batch_size: int) -> SwiftConfig:
    return cfg.replace(
        per_device_train_batch_size=per_device, gradient_accumulation_steps=None, global_batch_size=global_batch_size
    )


def config_of_retry(cfg: SwiftConfig, environ: Mapping[str, str]) -> SwiftConfig:
    """Return the configuration of this attempt: with the micro-batch of an earlier attempt's file, if there was one."""
    file = Path(cfg.checkpoint.output_dir, FILE)
    if not restart_count(environ) or not file.is_file():
        return cfg
    kept = json.loads(file.read_text(encoding="utf-8"))
    retried = _with_microbatch(cfg, int(kept["per_device_train_batch_size"]), int(kept["global_batch_size"]))
    old = cfg.train.per_device_train_batch_size
    new = retried.train.per_device_train_batch_size
    log.info(
        f"out of memory in the attempt before: --per_device_train_batch_size {new} in place of {old}, the same "
        f"{kept['global_batch_size']} rows a step"
    )
    return retried


def forget_earlier_retry(root: Path, environ: Mapping[str, str]) -> None:
    """Deletes the file of an earlier run in this folder; on one rank, at the first attempt."""
    if not restart_count(environ):
        (root / FILE).unlink(missing_ok=True)


def retry_after(error: UserError, cfg: SwiftConfig, dp: int, environ: Mapping[str, str]) -> UserError:
    """Return `OutOfMemoryRetry` in place of the error, and write the file for the next attempt; the error itself where
    no attempt follows, or an earlier attempt was out of memory."""
    file = Path(cfg.checkpoint.output_dir, FILE)
    attempt = restart_count(environ)
    if not cfg.fault_tolerance.oom_retry or not is_started_again(environ):
        return error
    if file.is_file() and json.loads(file.read_text(encoding="utf-8")).get("attempt") != attempt:
        return error
    smaller = smaller_microbatch(cfg, dp)
    if smaller is None:
        return error
    per_device = smaller.train.per_device_train_batch_size
    total = smaller.train.global_batch_size
    kept = {"per_device_train_batch_size": per_device, "global_batch_size": total, "attempt": attempt}
    write_atomically(file, json.dumps(kept))  # by each rank without memory: the same
    first = error.problems[0]
    rule = (
        f"--per_device_train_batch_size {per_device} in place of {cfg.train.per_device_train_batch_size} from here on"
    )
    return OutOfMemoryRetry(
        [Problem(first.what, first.rule), Problem("next attempt", rule, "--oom_retry false: no retry")]
    )


def is_started_again(environ: Mapping[str, str]) -> bool:
    """Return whether something starts this run's processes again after their end."""
    return bool(environ.get(OOM_RETRY)) or int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")) < int(
        environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    )
