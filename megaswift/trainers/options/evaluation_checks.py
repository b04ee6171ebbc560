"""Rules for evaluation and saving by steps or epochs, for the best model, early stopping and uploads. The comparison of
evaluations is in `megaswift.trainers.hooks.best_model`."""

from __future__ import annotations

from megaswift.bridge.adapters.options.checks import adapter_init_changes_base_weights
from megaswift.config.rule import ONE_OF, ConflictingOptions, IgnoredOption, Test
from megaswift.config.sections import Sections
from megaswift.options.tasks import RL
from megaswift.trainers.options.schedule import PLATEAU

REWARD = "reward"
LOSS = "loss"
DATA_OPTIONS = ("val_dataset", "split_dataset_ratio", "data_split")
_NO_DATA = "needs evaluation data (--val_dataset or --split_dataset_ratio)"
_DATA_FIX = "--val_dataset FILE or --split_dataset_ratio 0.01"


def evaluates(c: Sections) -> bool:
    """Whether the run has evaluation data and looks at them."""
    return has_evaluation_data(c) and c.evaluation.eval_strategy != "no"


def compares_evaluations(c: Sections) -> bool:
    """Whether anything depends on which evaluation is the best."""
    options = c.evaluation
    stops_early = options.early_stopping_patience is not None
    return (options.load_best_model_at_end or c.checkpoint.save_strategy == "best" or stops_early) and evaluates(c)


def best_model_metric(c: Sections) -> str:
    """The metric of an evaluation that says how good the model is."""
    metric = c.evaluation.metric_for_best_model or (REWARD if c.task in RL else LOSS)
    return metric.removeprefix("eval_")


def _evaluates_while_training(c: Sections) -> bool:
    return c.evaluation.eval_strategy == "epoch" or (
        c.evaluation.eval_steps is not None and c.evaluation.eval_strategy != "no"
    )


def _saves_without_evaluation(c: Sections) -> bool:
    """transformers' rule: checkpoints are saved where the model was evaluated."""
    saves = c.checkpoint
    options = c.evaluation
    if not options.load_best_model_at_end or saves.save_strategy == "best":
        return False
    if "epoch" in (options.eval_strategy, saves.save_strategy):
        return options.eval_strategy != saves.save_strategy
    if saves.save_steps is None or options.eval_steps is None or saves.save_strategy == "no":
        return True
    if min(saves.save_steps, options.eval_steps) < 1:  # a fraction of all steps, rounded up
        return saves.save_steps != options.eval_steps
    return saves.save_steps % options.eval_steps != 0


def _belongs_to_local_base(c: Sections) -> bool:
    changed = c.model.rope_scaling is not None or c.model.new_special_tokens or adapter_init_changes_base_weights(c)
    return bool(c.model.train_type != "full" and not c.lora.merge_lora and changed)


def _steps_without_interval(does: str) -> Test:
    return lambda c: c.value(f"{does}_strategy") == "steps" and c.value(f"{does}_steps") is None


def _epochs_of_a_stream(does: str) -> Test:
    return lambda c: c.data.streaming and c.value(f"{does}_strategy") == "epoch"


def has_evaluation_rows(c: Sections) -> bool:
    """Returns whether any rows are kept for evaluation."""
    return bool(c.data.val_dataset or c.data.split_dataset_ratio or c.data.evaluation_share)


def has_evaluation_data(c: Sections) -> bool:
    """Returns whether there is anything to evaluate on: rows, or tasks."""
    return has_evaluation_rows(c) or bool(c.evaluation.eval_tasks)


def best_model_matters(c: Sections) -> bool:
    """Returns whether anything depends on which evaluation is the best."""
    return compares_evaluations(c) or c.schedule.lr_scheduler_type == PLATEAU


EVALUATION_IGNORED: tuple[IgnoredOption, ...] = (
    *(
        IgnoredOption(
            f"{does}_strategy",
            (f"{does}_steps",),
            _steps_without_interval(does),
            f"--{does}_steps N sets the interval; without it only at the end",
            f"--{does}_steps N",
            notice=True,
        )
        for does in ("eval", "save")
    ),
    IgnoredOption(
        "load_best_model_at_end",
        ("export_hf", "train_type"),
        lambda c: c.model.train_type == "full" and not c.checkpoint.export_hf,
        "the best model is what the run exports, and export_hf is false",
        "--export_hf true",
    ),
)

EVALUATION_CLASHES: tuple[ConflictingOptions, ...] = (
    *(
        ConflictingOptions(
            (f"{does}_strategy", "streaming"),
            _epochs_of_a_stream(does),
            "a stream has no known length, so its epochs are not counted",
            f"--{does}_strategy steps --{does}_steps 500",
        )
        for does in ("eval", "save")
    ),
    ConflictingOptions(
        ("load_best_model_at_end", "eval_strategy", "save_strategy", "eval_steps", "save_steps"),
        lambda c: evaluates(c) and _saves_without_evaluation(c),
        "needs an evaluation at every checkpoint: eval_strategy and save_strategy must be the same, and save_steps a "
        "multiple of eval_steps",
        "--eval_steps 100 --save_steps 100, --eval_strategy epoch --save_strategy epoch, or --save_strategy best",
    ),
    ConflictingOptions(
        ("load_best_model_at_end", *DATA_OPTIONS),
        lambda c: c.evaluation.load_best_model_at_end and not evaluates(c),
        _NO_DATA,
        _DATA_FIX,
    ),
    ConflictingOptions(
        ("save_strategy", *DATA_OPTIONS, "eval_strategy", "eval_steps"),
        lambda c: c.checkpoint.save_strategy == "best" and not (evaluates(c) and _evaluates_while_training(c)),
        "best saves when an evaluation improves, so the run must evaluate: evaluation data and an interval",
        "--val_dataset FILE --eval_strategy steps --eval_steps 100",
    ),
    ConflictingOptions(
        ("early_stopping_patience", *DATA_OPTIONS, "eval_strategy", "eval_steps"),
        lambda c: (
            c.evaluation.early_stopping_patience is not None and not (evaluates(c) and _evaluates_while_training(c))
        ),
        "counts evaluations, so the run must evaluate: evaluation data and an interval",
        "--val_dataset FILE --eval_strategy steps --eval_steps 100",
    ),
    ConflictingOptions(
        ("lr_scheduler_type", *DATA_OPTIONS, "eval_strategy", "eval_steps"),
        lambda c: c.schedule.lr_scheduler_type == PLATEAU and not (evaluates(c) and _evaluates_while_training(c)),
        "follows evaluations, so the run must evaluate: evaluation data and an interval",
        "--val_dataset FILE --eval_strategy steps --eval_steps 100",
    ),
    ConflictingOptions(
        ("metric_for_best_model",),
        lambda c: c.task in RL and compares_evaluations(c) and best_model_metric(c) == LOSS,
        "evaluations of reinforcement learning have no loss",
        "--metric_for_best_model reward",
    ),
    ConflictingOptions(
        ("save_strategy", "export_hf"),
        lambda c: c.checkpoint.save_strategy == "no" and c.model.train_type == "full" and not c.checkpoint.export_hf,
        "no saves no checkpoint, and export_hf false no model: nothing of the run would remain",
        ONE_OF,
    ),
    ConflictingOptions(
        ("save_strategy", "max_restarts"),
        lambda c: c.checkpoint.save_strategy == "no" and c.launch.max_restarts,
        "no saves no checkpoint to restart from",
        "--save_strategy steps --save_steps 500",
    ),
    ConflictingOptions(
        ("push_to_hub", "export_hf"),
        lambda c: c.hub.push_to_hub and c.model.train_type == "full" and not c.checkpoint.export_hf,
        "uploads OUT/hf, which export_hf false disables",
        ONE_OF,
    ),
    ConflictingOptions(
        ("push_to_hub", "merge_lora", "rope_scaling", "new_special_tokens", "init_weights"),
        lambda c: c.hub.push_to_hub and _belongs_to_local_base(c),
        "would upload adapters whose base model is a local folder (rope_scaling, new_special_tokens or init_weights)",
        "--merge_lora true",
    ),
    ConflictingOptions(
        ("hub_strategy", "save_only_model", "train_type"),
        lambda c: (
            c.hub.push_to_hub
            and c.hub.hub_strategy == "every_save"
            and c.model.train_type == "full"
            and not c.checkpoint.save_only_model
        ),
        "every_save uploads checkpoints that are Hugging Face folders",
        "--save_only_model true, --hub_strategy checkpoint, or --hub_strategy end",
    ),
    ConflictingOptions(
        ("hub_revision", "use_hf"),
        lambda c: c.hub.hub_revision is not None and not c.model.use_hf,
        "names a branch of Hugging Face's hub; ModelScope gets the default branch",
        "leave it out",
    ),
)
