"""Rules for options of preference learning: options without effect, and conflicts."""

from __future__ import annotations

from megaswift.config.data import RL
from megaswift.config.engine_rules import drive_parts_of_option
from megaswift.config.loss_option_rules import ignored_by_loss_rules, loss_entries_of, value_required_by_loss_rules
from megaswift.config.loss_table import ALPHAPO, KL_PAIRS
from megaswift.config.preference import LOSSES, beta_of, loss_types_of, needs_reference
from megaswift.config.rule_types import ConflictingOptions, IgnoredOption, Test
from megaswift.config.sections import Sections


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


_FREE: Test = lambda c: c.preference.reference_free  # noqa: E731
_STILL: Test = lambda c: not c.preference.sync_ref_model  # noqa: E731
_NO_PULL: Test = lambda c: c.task in RL and beta_of(c) == 0  # noqa: E731
_REF = ("reference_free",)
_NO_REF = "reference_free disables the reference model"
_TYPE = ("loss_type",)

PREFERENCE_IGNORED: tuple[IgnoredOption, ...] = (
    *(
        IgnoredOption(name, _REF, _FREE, _NO_REF, "--reference_free false")
        for name in ("ref_model", "offload_reference", "sync_ref_model", "precompute_ref_log_probs")
    ),
    IgnoredOption(
        "offload_reference",
        ("precompute_ref_log_probs",),
        lambda c: c.preference.precompute_ref_log_probs,
        "there are no reference weights to offload",
        "--offload_reference false",
    ),
    *(
        IgnoredOption(name, ("beta",), _NO_PULL, "beta is 0, so no reference model is used", "--beta 0.01")
        for name in ("ref_model", "offload_reference", "sync_ref_model")
    ),
    *(
        IgnoredOption(name, ("sync_ref_model",), _STILL, "needs sync_ref_model", "--sync_ref_model true")
        for name in ("ref_model_mixup_alpha", "ref_model_sync_steps")
    ),
    IgnoredOption(
        "offload_reference",
        ("train_type", "adapters"),
        lambda c: c.model.train_type != "full" and c.lora.adapters is None,
        "with new adapters the reference is the base model, which needs no additional weights",
        "--offload_reference false",
    ),
    *ignored_by_loss_rules("dpo", "kto", "cpo"),
    IgnoredOption(
        "f_alpha_divergence_coef",
        ("f_divergence_type",),
        lambda c: c.preference.f_divergence_type != "alpha_divergence",
        "applies only to f_divergence_type alpha_divergence",
        "--f_divergence_type alpha_divergence",
    ),
    IgnoredOption(
        "cpo_alpha",
        _TYPE,
        lambda c: c.preference.loss_type == (ALPHAPO,),
        "loss_type alphapo has no NLL term",
        "--loss_type simpo",
    ),
)

PREFERENCE_CLASHES: tuple[ConflictingOptions, ...] = (
    ConflictingOptions(
        ("beta",),
        lambda c: c.task not in RL and c.preference.beta == 0,
        "must be > 0: at 0 the objective is constant",
        "--beta 0.1",
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
