"""Rules for options of preference learning: options without effect, and conflicts."""

from __future__ import annotations

from megaswift.config.rule import ConflictingOptions, IgnoredOption
from megaswift.config.sections import Sections
from megaswift.engine.options.engine_checks import drive_parts_of_option
from megaswift.losses.options.loss_table import KL_PAIRS
from megaswift.losses.options.preference import LOSSES, loss_types_of, needs_reference
from megaswift.losses.options.required_values import loss_entries_of, value_required_by_loss_rules
from megaswift.options.tasks import DISTILLATION, SAMPLED


def _foreign(c: Sections) -> bool:
    return c.task in LOSSES and bool(set(c.preference.loss_type) - set(LOSSES[c.task]))


def _single(c: Sections) -> bool:
    return c.task in LOSSES and c.task != "dpo" and len(c.preference.loss_type) > 1


def _pairs_prompts(c: Sections) -> bool:
    return any(KL_PAIRS in loss.needs for loss in loss_entries_of(c))


def _reference_on_a_drive(c: Sections) -> bool:
    """Whether the weights that would be exchanged with the reference's are in files: those of a model without new
    adapters, unless the reference is asked once before training."""
    whole = c.model.train_type == "full" and not c.preference.precompute_ref_log_probs
    return (
        (whole or c.lora.adapters is not None)
        and needs_reference(c)
        and "param" in drive_parts_of_option(c.engine.deepspeed)
    )


_TYPE = ("loss_type",)

PREFERENCE_IGNORED: tuple[IgnoredOption, ...] = (
    IgnoredOption(
        "offload_reference",
        ("train_type", "adapters"),
        lambda c: c.model.train_type != "full" and c.lora.adapters is None,
        "with new adapters the reference is the base model, which needs no additional weights",
        "--offload_reference false",
    ),
)

PREFERENCE_CLASHES: tuple[ConflictingOptions, ...] = (
    ConflictingOptions(
        ("beta",),
        lambda c: c.task not in SAMPLED and c.preference.beta == 0,
        "must be > 0: at 0 the objective is constant",
        "--beta 0.1",
    ),
    ConflictingOptions(
        ("beta",),
        lambda c: c.task in DISTILLATION and (c.preference.beta or 0) > 1,
        "must be at most 1: it moves from the forward KL (0) to the reverse KL (1)",
        "--beta 0.5",
    ),
    ConflictingOptions(
        _TYPE,
        _foreign,
        "is a loss of another task",
        "use a loss of this task (docs/preference.md), or the command of that loss: megaswift simpo, megaswift "
        "grpo, ...",
    ),
    ConflictingOptions(_TYPE, _single, "accepts a single type in this task", "keep one of them"),
    ConflictingOptions(
        ("loss_weights", "loss_type"),
        lambda c: len(c.preference.loss_weights) not in (0, len(loss_types_of(c))),
        "must have one number for each loss_type",
        "give --loss_weights as many numbers",
    ),
    *value_required_by_loss_rules("dpo", "kto", "cpo"),
    ConflictingOptions(
        ("ref_model", "train_type"),
        lambda c: c.preference.ref_model is not None and c.model.train_type != "full",
        "with adapters the reference is the base model",
        "--train_type full, or leave out --ref_model",
    ),
    ConflictingOptions(
        ("sync_ref_model", "train_type"),
        lambda c: c.preference.sync_ref_model and c.model.train_type != "full",
        "with adapters the reference is the frozen base model, which cannot be updated",
        "--train_type full",
    ),
    ConflictingOptions(
        ("precompute_ref_log_probs", "sync_ref_model"),
        lambda c: c.preference.precompute_ref_log_probs and c.preference.sync_ref_model,
        "scores the rows once, but sync_ref_model updates the reference",
        "keep one of the two",
    ),
    ConflictingOptions(
        ("precompute_ref_log_probs", "streaming"),
        lambda c: c.preference.precompute_ref_log_probs and c.data.streaming,
        "scores every row before training, which is not possible with a stream",
        "--streaming false",
    ),
    ConflictingOptions(
        ("precompute_ref_log_probs", "loss_type"),
        lambda c: c.preference.precompute_ref_log_probs and _pairs_prompts(c),
        "is not supported by kto, whose mismatched prompt-completion pairs differ in every step",
        "--precompute_ref_log_probs false; --offload_reference true keeps the reference weights in CPU memory",
    ),
    ConflictingOptions(
        ("deepspeed",),
        _reference_on_a_drive,
        "keeps the weights on a drive (offload_param), where they cannot be exchanged for a reference model's",
        '"device": "cpu" for offload_param in the file, or --train_type lora, whose base model is the reference',
    ),
    ConflictingOptions(
        ("random_init",),
        lambda c: c.model.random_init and needs_reference(c),
        "a randomly initialized reference model is meaningless",
        "--random_init false",
    ),
)
