"""Section `train`: batch sizes, length of the run, what is logged and saved, and where. Arithmetic is in `batch.py`."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.config.option import LARGEST_SEED, option


@dataclass(frozen=True)
class TrainConfig:
    """Training"""

    per_device_train_batch_size: int = option(
        1,
        "Rows of one forward pass on a dp rank",
        aliases=("micro_batch_size", "per_device_batch_size"),
        minimum=1,
        unit="rows",
    )
    per_device_eval_batch_size: int | None = option(
        None, "The same in evaluation; unset: as in training", minimum=1, unit="rows"
    )
    gradient_accumulation_steps: int | None = option(
        None, "Forward passes per optimizer step; unset: from global_batch_size, else 1", minimum=1, unit="passes"
    )
    global_batch_size: int | None = option(
        None, "Rows per optimizer step over all ranks", aliases=("gbs",), minimum=1, unit="rows"
    )
    max_steps: int | None = option(
        None,
        "Optimizer steps; unset: from num_train_epochs",
        aliases=("train_iters", "max_iters"),
        minimum=1,
        unset=("-1",),
        unit="steps",
    )
    num_train_epochs: float = option(
        1.0, "Passes over the data", aliases=("num_epochs", "max_epochs"), above=0, unit="epochs"
    )
    seed: int = option(42, "Seed of weights, dropout and data order", minimum=0, maximum=LARGEST_SEED)
    deterministic: bool = option(
        False,
        "Two runs of one command are equal bit by bit; slower on GPUs",
        aliases=("deterministic_mode", "full_determinism"),
    )
    logging_steps: int = option(
        1, "Steps between lines of metrics.jsonl", aliases=("log_interval",), minimum=1, unit="steps"
    )
    eval_steps: int | None = option(
        None, "Steps between evaluations; unset: at the end only", aliases=("eval_interval",), minimum=1, unit="steps"
    )
    eval_iters: int | None = option(
        None,
        "Evaluation batches of global_batch_size rows each; unset: all rows",
        minimum=1,
        unset=("-1",),
        unit="batches",
    )
    save_steps: int | None = option(
        None, "Steps between checkpoints; unset: at the end only", aliases=("save_interval",), minimum=1, unit="steps"
    )
    save_total_limit: int | None = option(
        None, "Checkpoints kept, the newest; unset: all", minimum=1, unset=("-1",), unit="checkpoints"
    )
    output_dir: str = option("output", "Folder for everything the run writes", aliases=("save",))
    overwrite_output_dir: bool = option(False, "Replace the run that output_dir holds")
    resume_from_checkpoint: str | None = option(
        None,
        "Go on from a checkpoint folder, or from the latest of output_dir",
        aliases=("load",),
        metavar="DIR|latest",
    )
    report_to: tuple[str, ...] = option(
        ("tensorboard",), "Other places for the metrics; none: no other", choices=("tensorboard", "wandb")
    )
    export_hf: bool = option(True, "Write output_dir/hf at the end")
    neftune_noise_alpha: float | None = option(
        None, "Noise on embeddings in training (NEFTune; not the native engine); unset: none", above=0, metavar="X"
    )
