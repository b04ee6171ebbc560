"""What a vision-language model asks of a run, and what it would ignore, told before a process group exists. No
torch."""

from __future__ import annotations

from megaswift.config import SwiftConfig
from megaswift.data.processor import unreadable
from megaswift.errors import Problem
from megaswift.families.model_source import locate_model
from megaswift.families.model_spec import ModelSpec
from megaswift.families.vision import has_tower

FLAGS = ("freeze_vit", "freeze_aligner", "freeze_llm")


def vision_problems(cfg: SwiftConfig, spec: ModelSpec) -> list[Problem]:
    """Options that do not fit the model; what reading images needs."""
    model = f"--model {cfg.model.model}"
    if not has_tower(spec.hf_config):
        return [
            Problem(
                f"--{name} {str(cfg.value(name)).lower()}",
                "is for vision-language models, and this one reads text only",
                "leave it out",
            )
            for name in FLAGS
            if cfg.value(name) is not None
        ]
    if cfg.task != "sft":
        return [
            Problem(
                model,
                f"is a vision-language model, which sft trains; {cfg.task} is for language models",
                "megaswift sft, or a language model",
            )
        ]
    problems = []
    if cfg.data.packing:
        problems.append(
            Problem(
                "--packing true",
                "rows of vision-language models are not packed: their images' positions and "
                "attention would have to be kept apart",
                "--packing false",
            )
        )
    if cfg.data.streaming:
        problems.append(
            Problem(
                "--streaming true",
                "rows with images are not streamed",
                "--streaming false: pixels are read as they are needed, tokens alone are kept on disk",
            )
        )
    return problems + unreadable(locate_model(cfg.model, weights=False), model)
