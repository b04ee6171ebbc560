"""Rules for the options that freeze weights, and that train some of them."""

from __future__ import annotations

from megaswift.config.rule_types import IgnoredOption

FROZEN_WEIGHT_IGNORED: tuple[IgnoredOption, ...] = (
    IgnoredOption(
        "freeze_parameters",
        ("train_type",),
        lambda c: c.model.train_type != "full",
        "with train_type {train_type} all model weights except modules_to_save are frozen",
        "--train_type full",
    ),
    IgnoredOption(
        "trainable_parameters",
        ("train_type",),
        lambda c: c.model.train_type != "full",
        "with train_type {train_type} adapters and modules_to_save are trained",
        "--modules_to_save NAME",
    ),
    IgnoredOption(
        "trainable_parameters",
        ("train_type", "freeze_parameters", "freeze_vit", "freeze_aligner", "freeze_llm"),
        lambda c: (
            c.model.train_type == "full"
            and not c.model.freeze_parameters
            and not (c.model.freeze_vit or c.model.freeze_aligner or c.model.freeze_llm)
        ),
        "no weights are frozen",
        "--freeze_parameters . to train these weights only",
    ),
    IgnoredOption(
        "vit_lr",
        ("freeze_vit",),
        lambda c: c.model.freeze_vit is not False,
        "the vision encoder is frozen, by default too",
        "--freeze_vit false",
    ),
    IgnoredOption(
        "aligner_lr",
        ("freeze_aligner",),
        lambda c: c.model.freeze_aligner is not False,
        "the aligner is frozen, by default too",
        "--freeze_aligner false",
    ),
)
