"""Rules about checkpoints, the output directory and the export."""

from __future__ import annotations

from megaswift.config.rule import ONE_OF, ConflictingOptions, IgnoredOption
from megaswift.config.sections import Sections


def _exports_no_model(c: Sections) -> bool:
    return c.model.train_type != "full" and not c.lora.merge_lora


CHECKPOINT_IGNORED: tuple[IgnoredOption, ...] = (
    IgnoredOption(
        "save_total_limit",
        ("save_strategy",),
        lambda c: c.checkpoint.save_strategy == "no",
        "limits what save_steps or the clock save; save_strategy no saves only a run that is interrupted",
        "--save_strategy steps --save_steps 500",
        notice=True,
    ),
    IgnoredOption(
        "export_hf",
        ("train_type", "merge_lora"),
        _exports_no_model,
        "with train_type {train_type} the export is OUT/adapter; OUT/hf is written only with merge_lora",
        "--merge_lora true",
    ),
)

CHECKPOINT_CLASHES: tuple[ConflictingOptions, ...] = (
    ConflictingOptions(
        ("overwrite_output_dir", "resume_from_checkpoint"),
        lambda c: c.checkpoint.overwrite_output_dir and c.checkpoint.resume_from_checkpoint,
        "would delete the run that resume_from_checkpoint continues",
        ONE_OF,
    ),
    ConflictingOptions(
        ("add_version", "overwrite_output_dir"),
        lambda c: c.checkpoint.add_version and c.checkpoint.overwrite_output_dir,
        "writes to a new folder, which contains no run to replace",
        ONE_OF,
    ),
    ConflictingOptions(
        ("async_save", "save_only_model"),
        lambda c: c.checkpoint.async_save and c.checkpoint.save_only_model,
        "writes the optimizer's states in the background, and save_only_model leaves them out",
        ONE_OF,
    ),
    ConflictingOptions(
        ("save_only_model", "max_restarts"),
        lambda c: c.checkpoint.save_only_model and c.launch.max_restarts,
        "conflicts with max_restarts: a restart resumes with the optimizer's states",
        ONE_OF,
    ),
    ConflictingOptions(
        ("merge_lora", "export_hf"),
        lambda c: c.model.train_type != "full" and c.lora.merge_lora and not c.checkpoint.export_hf,
        "writes OUT/hf, which export_hf false disables",
        ONE_OF,
    ),
)
