"""Section `train`: batch sizes, length of the run, logging and checkpoints. Batch arithmetic is in
`batch_sizes.py`."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.options.option import LARGEST_SEED, but_not, one_of, option
from megaswift.options.tasks import EVERY_TASK, FITTED, LANGUAGE


@dataclass(frozen=True)
class TrainConfig:
    """Training"""

    per_device_train_batch_size: int = option(
        1,
        "Micro-batch size per data-parallel rank",
        aliases=("micro_batch_size", "per_device_batch_size"),
        minimum=1,
        unit="samples",
        common=EVERY_TASK,
    )
    per_device_eval_batch_size: int | None = option(
        None,
        "Micro-batch size in evaluation; default: same as in training",
        minimum=1,
        unit="samples",
        only_with={"evaluation_rows": one_of(True, notice=True)},
    )
    eval_iters: int | None = option(
        None,
        "Evaluation batches of global_batch_size samples each; default: all samples",
        minimum=1,
        unset=("-1",),
        unit="batches",
        only_with={"evaluation_rows": one_of(True, notice=True)},
    )
    gradient_accumulation_steps: int | None = option(
        None,
        "Micro-batches per optimizer step; default: from global_batch_size, else 1",
        minimum=1,
        unit="micro-batches",
        common=EVERY_TASK,
    )
    global_batch_size: int | None = option(
        None,
        "Samples per optimizer step over all ranks",
        aliases=("gbs",),
        minimum=1,
        unit="samples",
        common=EVERY_TASK,
    )
    max_steps: int | None = option(
        None,
        "Optimizer steps; default: from num_train_epochs",
        aliases=("train_iters", "max_iters"),
        minimum=1,
        unset=("-1",),
        unit="steps",
        common=EVERY_TASK,
    )
    num_train_epochs: float = option(
        1.0,
        "Passes over the training data",
        aliases=("num_epochs", "max_epochs"),
        above=0,
        unit="epochs",
        common=EVERY_TASK,
    )
    label_smoothing_factor: float = option(
        0.0,
        "Share of each label that is spread evenly over the vocabulary",
        tasks=LANGUAGE,
        minimum=0,
        below=1,
    )
    enable_dft_loss: bool = option(
        False,
        "Multiply the loss of each token by its probability (dynamic fine-tuning)",
        tasks=LANGUAGE,
        only_with={"label_smoothing_factor": 0.0},
    )
    seed: int = option(42, "Seed for weight initialization, dropout and data order", minimum=0, maximum=LARGEST_SEED)
    deterministic: bool = option(
        False,
        "Bitwise reproducible runs; slower on GPUs",
        aliases=("deterministic_mode", "full_determinism"),
    )
    tf32: bool | None = option(None, "Round float32 products to TF32 on GPUs; default: as in PyTorch", metavar="BOOL")
    logging_steps: int | float = option(
        1,
        "Steps between entries in metrics.jsonl; below 1: fraction of all steps",
        aliases=("log_interval",),
        minimum=1,
        fraction=True,
        unit="steps",
    )
    logging_first_step: bool = option(False, "Also log the first step, with any logging_steps")
    fit: bool = option(
        False,
        "Choose recomputation, micro-batch and optimizer settings that fit the device",
        tasks=FITTED,
    )
    device_memory: str | None = option(
        None,
        "Memory of a device for fit; default: the GPU's",
        metavar="SIZE",
        tasks=FITTED,
        only_with={"fit": True},
        neutral=(None,),
    )
    external_plugins: tuple[str, ...] = option(
        (),
        "Python files that register rewards, data formats, losses, ... (docs/plugins.md)",
        aliases=("custom_register_path",),
        metavar="FILE...",
    )
    neftune_noise_alpha: float | None = option(
        None,
        "NEFTune noise on embeddings (torch engines only); default: no noise",
        above=0,
        metavar="X",
        only_with={"engine": but_not("megatron")},
    )
