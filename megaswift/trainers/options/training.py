"""Section `train`: batch sizes, length of the run, logging and checkpoints. Batch arithmetic is in
`batch_sizes.py`."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.options.option import LARGEST_SEED, but_not, is_set, one_of, option
from megaswift.options.tasks import PREFERENCES
from megaswift.trainers.options.tracker import TRACKERS


@dataclass(frozen=True)
class TrainConfig:
    """Training"""

    per_device_train_batch_size: int = option(
        1,
        "Micro-batch size per data-parallel rank",
        aliases=("micro_batch_size", "per_device_batch_size"),
        minimum=1,
        unit="samples",
    )
    per_device_eval_batch_size: int | None = option(
        None,
        "Micro-batch size in evaluation; unset: same as in training",
        minimum=1,
        unit="samples",
        only_with={"evaluation_data": one_of(True, notice=True)},
    )
    gradient_accumulation_steps: int | None = option(
        None, "Micro-batches per optimizer step; unset: from global_batch_size, else 1", minimum=1, unit="micro-batches"
    )
    global_batch_size: int | None = option(
        None, "Samples per optimizer step over all ranks", aliases=("gbs",), minimum=1, unit="samples"
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
        1.0, "Passes over the training data", aliases=("num_epochs", "max_epochs"), above=0, unit="epochs"
    )
    label_smoothing_factor: float = option(
        0.0,
        "Share of each label that is spread evenly over the vocabulary",
        tasks=("sft", "pt"),
        minimum=0,
        below=1,
    )
    seed: int = option(42, "Seed for weight initialization, dropout and data order", minimum=0, maximum=LARGEST_SEED)
    deterministic: bool = option(
        False,
        "Bitwise reproducible runs; slower on GPUs",
        aliases=("deterministic_mode", "full_determinism"),
    )
    tf32: bool | None = option(
        None, "Round float32 products to TF32 on GPUs; unset: PyTorch's default", metavar="true|false"
    )
    logging_steps: int | float = option(
        1,
        "Steps between entries in metrics.jsonl; below 1: that fraction of all steps",
        aliases=("log_interval",),
        minimum=1,
        fraction=True,
        unit="steps",
    )
    logging_first_step: bool = option(False, "Log the first step too, whatever logging_steps is")
    fit: bool = option(
        False,
        "Choose recomputation, micro-batch and optimizer settings that fit the device",
        tasks=("sft", "pt"),
    )
    device_memory: str | None = option(
        None,
        "Memory of a device for fit; unset: the GPU's",
        metavar="139GiB",
        tasks=("sft", "pt"),
        only_with={"fit": True},
        neutral=(None,),
    )
    profile: bool = option(False, "Profile some steps: traces and a table of times in output_dir/profile")
    profile_step_start: int = option(
        2,
        "Profiling starts after this step",
        minimum=0,
        unit="steps",
        only_with={"profile": one_of(True, notice=True)},
        neutral=(2,),
    )
    profile_step_end: int = option(
        4,
        "Profiling ends after this step",
        minimum=1,
        unit="steps",
        only_with={"profile": one_of(True, notice=True)},
        neutral=(4,),
    )
    profile_ranks: tuple[int, ...] = option(
        (0,), "Ranks that are profiled", minimum=0, only_with={"profile": one_of(True, notice=True)}, neutral=((0,),)
    )
    eval_strategy: str | None = option(
        None,
        "When to evaluate; unset: every eval_steps and at the end",
        aliases=("evaluation_strategy",),
        choices=("no", "steps", "epoch"),
        only_with={"evaluation_data": one_of(True, notice=True)},
        neutral=(None, "no"),
    )
    eval_steps: int | float | None = option(
        None,
        "Steps between evaluations; below 1: fraction of all steps; unset: at the end",
        aliases=("eval_interval",),
        minimum=1,
        fraction=True,
        unit="steps",
        only_with={"evaluation_data": one_of(True, notice=True), "eval_strategy": one_of("steps", None, notice=True)},
    )
    eval_on_start: bool = option(
        False,
        "Evaluate before the first step too",
        tasks=("sft", "pt", *PREFERENCES),
        only_with={"evaluation_data": one_of(True, notice=True), "eval_strategy": but_not("no", notice=True)},
    )
    eval_iters: int | None = option(
        None,
        "Evaluation batches of global_batch_size samples each; unset: all samples",
        minimum=1,
        unset=("-1",),
        unit="batches",
        only_with={"evaluation_data": one_of(True, notice=True)},
    )
    save_strategy: str | None = option(
        None,
        "When to save; no: only when interrupted; unset: every save_steps and at the end",
        choices=("no", "steps", "epoch", "best"),
    )
    save_steps: int | float | None = option(
        None,
        "Steps between checkpoints; below 1: fraction of all steps; unset: at the end",
        aliases=("save_interval",),
        minimum=1,
        fraction=True,
        unit="steps",
        only_with={"save_strategy": one_of("steps", None, notice=True)},
    )
    save_total_limit: int | None = option(
        None, "Number of checkpoints to keep, newest first; unset: all", minimum=1, unset=("-1",), unit="checkpoints"
    )
    load_best_model_at_end: bool = option(False, "Export the checkpoint with the best evaluation, not the last one")
    metric_for_best_model: str | None = option(
        None,
        "Evaluation metric that says which model is best; unset: loss, in RL reward",
        only_with={"best_model": is_set(notice=True)},
    )
    greater_is_better: bool | None = option(
        None,
        "Whether a larger metric is better; unset: unless its name ends in loss",
        only_with={"best_model": is_set(notice=True)},
    )
    early_stopping_patience: int | None = option(
        None,
        "Evaluations in succession without improvement that end the run; unset: any",
        aliases=("early_stop_interval",),
        minimum=1,
        unit="evaluations",
    )
    early_stopping_threshold: float = option(
        0.0,
        "Change of the metric that early stopping counts as an improvement",
        minimum=0,
        only_with={"early_stopping_patience": is_set()},
    )
    save_only_model: bool = option(
        False, "Checkpoints hold the weights alone, without optimizer and random states", aliases=("no_save_optim",)
    )
    async_save: bool = option(
        False,
        "Write checkpoints in the background, from a copy in host memory (native engine)",
        only_with={"engine": ("megatron", "auto")},
    )
    save_rng: bool = option(True, "Save random states in checkpoints; false: a resumed run draws other ones")
    exit_interval: int | None = option(
        None,
        "Save and end the run after steps divisible by this; unset: at the last step",
        minimum=1,
        unit="steps",
    )
    output_dir: str = option("output", "Output directory of the run", aliases=("save",))
    add_version: bool | None = option(
        None,
        "Write to a new folder output_dir/vN-DATE-TIME; unset: if no output_dir is given",
        metavar="true|false",
    )
    overwrite_output_dir: bool = option(False, "Replace an earlier run in output_dir")
    resume_from_checkpoint: str | None = option(
        None,
        "Checkpoint folder to resume from; latest: the newest in output_dir or a version",
        aliases=("load",),
        metavar="DIR|latest",
    )
    ignore_data_skip: bool = option(
        False,
        "A resumed run begins its data from the first row again",
        tasks=("sft", "pt", *PREFERENCES),
        only_with={"resume_from_checkpoint": is_set(notice=True)},
    )
    report_to: tuple[str, ...] = option(
        ("tensorboard",),
        "Experiment trackers, in addition to metrics.jsonl; none: no tracker",
        choices=TRACKERS,
    )
    run_name: str | None = option(
        None,
        "Name of the run in online trackers; unset: output_dir's",
        aliases=("experiment_name", "swanlab_exp_name", "wandb_exp_name"),
    )
    export_hf: bool = option(True, "Write the trained model to output_dir/hf at the end")
    external_plugins: tuple[str, ...] = option(
        (),
        "Python files that register rewards, data formats, losses, ... (docs/plugins.md)",
        aliases=("custom_register_path",),
        metavar="FILE...",
    )
    push_to_hub: bool = option(False, "Upload OUT/hf, or OUT/adapter, to a model repository of the hub (use_hf)")
    hub_model_id: str | None = option(
        None,
        "Repository, NAME or ORGANIZATION/NAME; unset: output_dir's name",
        aliases=("push_to_hub_model_id",),
        metavar="ID",
        only_with={"push_to_hub": one_of(True, notice=True)},
    )
    hub_token: str | None = option(
        None,
        "Token of the hub; unset: the one stored by the hub's client",
        aliases=("push_to_hub_token",),
        secret=True,
        only_with={"push_to_hub": one_of(True, notice=True)},
    )
    hub_revision: str | None = option(
        None,
        "Branch of the repository, made where it is missing (Hugging Face); unset: main",
        metavar="BRANCH",
        only_with={"push_to_hub": one_of(True, notice=True)},
    )
    hub_private_repo: bool = option(
        False, "Make a new repository private", only_with={"push_to_hub": one_of(True, notice=True)}
    )
    hub_strategy: str = option(
        "end",
        "Uploads: at the end; also each checkpoint: its weights, the newest, all",
        choices=("end", "every_save", "checkpoint", "all_checkpoints"),
        only_with={"push_to_hub": one_of(True, notice=True)},
        neutral=(None, "end"),
    )
    neftune_noise_alpha: float | None = option(
        None,
        "NEFTune noise on embeddings (torch engines only); unset: no noise",
        above=0,
        metavar="X",
        only_with={"engine": but_not("megatron")},
    )
