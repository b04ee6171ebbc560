"""Section `checkpoint`: the output folder, what is saved there and when, and where a run resumes."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.options.option import is_set, one_of, option
from megaswift.options.tasks import DATASETS, EVERY_TASK

# A run without an option about saving is saved by the clock.
LONG_RUN = 3600.0
"""Seconds from which such a run is saved before its end."""
INTERVAL = 1800.0
"""Seconds between two of its checkpoints."""
KEPT = 2
"""Checkpoints that stay of it: the newest, and the one before."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Output folder and checkpoints"""

    output_dir: str = option("output", "Output directory of the run", aliases=("save",), common=EVERY_TASK)
    add_version: bool | None = option(
        None,
        "Write to a new folder output_dir/vN-DATE-TIME; default: if no output_dir given",
        metavar="BOOL",
    )
    overwrite_output_dir: bool = option(False, "Replace an earlier run in output_dir")
    resume_from_checkpoint: str | None = option(
        None,
        "Checkpoint folder to resume from; latest: the newest in output_dir or a version",
        aliases=("load",),
        metavar="DIR",
        common=EVERY_TASK,
    )
    ignore_data_skip: bool = option(
        False,
        "Start the data of a resumed run from the first row again",
        tasks=DATASETS,
        only_with={"resume_from_checkpoint": is_set(notice=True)},
    )
    save_strategy: str | None = option(
        None,
        "When to save; no: only when interrupted; default: every save_steps, at the end",
        choices=("no", "steps", "epoch", "best"),
    )
    save_steps: int | float | None = option(
        None,
        "Steps between checkpoints; below 1: fraction of steps; default: every 30 min",
        aliases=("save_interval",),
        minimum=1,
        fraction=True,
        unit="steps",
        only_with={"save_strategy": one_of("steps", None, notice=True)},
        common=EVERY_TASK,
    )
    save_total_limit: int | None = option(
        None,
        "Number of checkpoints to keep, newest first; default: all",
        minimum=1,
        unset=("-1",),
        unit="checkpoints",
        common=EVERY_TASK,
    )
    save_only_model: bool = option(
        False, "Save only the weights in checkpoints, without optimizer and random states", aliases=("no_save_optim",)
    )
    async_save: bool = option(
        False,
        "Write checkpoints in the background, from a copy in host memory (native engine)",
        only_with={"engine": ("megatron", "auto")},
    )
    save_rng: bool = option(True, "Save random states in checkpoints; false: a resumed run draws new numbers")
    exit_interval: int | None = option(
        None,
        "Save and end the run after a step divisible by this; default: the last step",
        minimum=1,
        unit="steps",
    )
    export_hf: bool = option(True, "Write the trained model to output_dir/hf at the end")


def saves_by_time(options: CheckpointConfig) -> bool:
    """Return whether no option says when to save: a run that expects to last over an hour is then saved by the
    clock."""
    return options.save_strategy is None and options.save_steps is None
