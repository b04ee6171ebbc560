"""`--oom_retry` and `--auto_find_batch_size`: after an out-of-memory error a run is started again with a smaller
micro-batch and the same global batch, once or until it fits.

The file OUT/oom_retry.json carries the micro-batch to the next attempt. An error is retried only where something starts
the processes again: this toolkit's launcher, torchrun with --max-restarts, or this very process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Microbatch:
    """The size of a micro-batch."""

    rows: int
    tokens: int | None = None
    """Of `--max_tokens_per_batch`."""

    @classmethod
    def of(cls, cfg: SwiftConfig) -> Microbatch:
        """Return that of a configuration."""
        return cls(cfg.train.per_device_train_batch_size, cfg.data.max_tokens_per_batch)

    @property
    def option(self) -> str:
        """Return the option that sets it, as written on a command line."""
        if self.tokens is None:
            return f"--per_device_train_batch_size {self.rows}"
        return f"--max_tokens_per_batch {self.tokens}"

    @property
    def size(self) -> int:
        """Return the value of this option."""
        return self.rows if self.tokens is None else self.tokens


def smaller_microbatch(cfg: SwiftConfig, dp: int) -> SwiftConfig | None:
    """Return the configuration with the largest micro-batch of at most half the rows that divides a data-parallel
    rank's share of the global batch; None where there is none. Where tokens limit a micro-batch, half of them, but a
    whole row."""
    tokens = cfg.data.max_tokens_per_batch
    if tokens is None:
        return with_microbatch_of_at_most(cfg, dp, cfg.train.per_device_train_batch_size // 2)
    if tokens <= cfg.data.max_length:
        return None
    return cfg.replace(max_tokens_per_batch=max(tokens // 2, cfg.data.max_length))


def with_microbatch_of_at_most(cfg: SwiftConfig, dp: int, most: int) -> SwiftConfig | None:
    """Return the configuration with the largest micro-batch of at most `most` rows that leaves the global batch as it
    is; None where there is none."""
    plan = batch_plan(cfg.train, dp)
    rows = plan.per_device * plan.accumulation
    for per_device in range(most, 0, -1):
        if rows % per_device == 0:
            try:
                return cfg.replace(
                    per_device_train_batch_size=per_device,
                    gradient_accumulation_steps=None,
                    global_batch_size=plan.global_batch_size,
                )
            except ConfigError:  # a task that needs several rows together
                continue
    return None


def config_of_retry(cfg: SwiftConfig, dp: int, environ: Mapping[str, str]) -> SwiftConfig:
    """Return the configuration of this attempt: with the micro-batch of an earlier attempt's file, if there was one.
    With `--auto_find_batch_size` a run that is resumed in its folder keeps it, too."""
    file = Path(cfg.checkpoint.output_dir, FILE)
    if not (restart_count(environ) or _resumes_with_found_size(cfg)) or not file.is_file():
        return cfg
    kept = json.loads(file.read_text(encoding="utf-8"))
    found = Microbatch(int(kept["per_device_train_batch_size"]), kept.get("max_tokens_per_batch"))
    now = Microbatch.of(cfg)
    if (found.tokens is None) != (now.tokens is None) or found.size >= now.size:
        return cfg  # the options of a resumed run set another limit, or a smaller one
    if found.tokens is None:
        retried = with_microbatch_of_at_most(cfg, dp, found.rows)
    else:
        retried = cfg.replace(max_tokens_per_batch=max(found.tokens, cfg.data.max_length))
    if retried is None:
        return cfg
    when = "in the attempt before" if restart_count(environ) else "earlier in this run"
    total = batch_plan(cfg.train, dp).global_batch_size
    log.info(
        f"out of memory {when}: {Microbatch.of(retried).option} in place of {now.size}, the same {total} rows a step"
    )
    return retried


def _resumes_with_found_size(cfg: SwiftConfig) -> bool:
    return cfg.fault_tolerance.auto_find_batch_size and cfg.checkpoint.resume_from_checkpoint is not None


def forget_earlier_retry(cfg: SwiftConfig, root: Path, environ: Mapping[str, str]) -> None:
    """Deletes the file of an earlier run in this folder; on one rank, at the first attempt."""
    if not restart_count(environ) and not _resumes_with_found_size(cfg):
        (root / FILE).unlink(missing_ok=True)


def retry_after(error: UserError, cfg: SwiftConfig, dp: int, environ: Mapping[str, str]) -> UserError:
    """Return `OutOfMemoryRetry` in place of the error, and write the file for the next attempt; the error itself where
    no attempt follows. Without `--auto_find_batch_size` only one attempt does."""
    file = Path(cfg.checkpoint.output_dir, FILE)
    attempt = restart_count(environ)
    options = cfg.fault_tolerance
    if not options.oom_retry or not is_started_again(environ):
        return error
    retried = file.is_file() and json.loads(file.read_text(encoding="utf-8")).get("attempt") != attempt
    if retried and not options.auto_find_batch_size:
        return error
    smaller = smaller_microbatch(cfg, dp)
    if smaller is None:
        return error
    size = Microbatch.of(smaller)
    kept = {
        "per_device_train_batch_size": size.rows,
        "max_tokens_per_batch": size.tokens,
        "global_batch_size": batch_plan(smaller.train, dp).global_batch_size,
        "attempt": attempt,
    }
    write_atomically(file, json.dumps(kept))  # by each rank without memory: the same
    first = error.problems[0]
    rule = f"{size.option} in place of {Microbatch.of(cfg).size} from here on"
    return OutOfMemoryRetry(
        [Problem(first.what, first.rule), Problem("next attempt", rule, "--oom_retry false: no retry")]
    )


def is_started_again(environ: Mapping[str, str]) -> bool:
    """Return whether something starts this run's processes again after their end."""
    return bool(environ.get(OOM_RETRY)) or int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")) < int(
        environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    )
