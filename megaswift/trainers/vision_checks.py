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
                "applies only to vision-language models; this model accepts only text",
                "leave it out",
            )
            for name in FLAGS
            if cfg.value(name) is not None
        ]
    if cfg.task != "sft":
        return [
            Problem(
                model,
                f"is a vision-language model, which only sft supports; {cfg.task} needs a language model",
                "megaswift sft, or a language model",
            )
        ]
    problems = []
    if cfg.data.packing:
        problems.append(
            Problem(
                "--packing true",
                "samples of vision-language models are not packed: positions and attention of their images would mix",
                "--packing false",
            )
        )
    if cfg.data.streaming:
        problems.append(
            Problem(
                "--streaming true",
                "rows with images are not streamed",
                "--streaming false: images are read on demand, and only tokens are cached",
            )
        )
    return problems + unreadable(locate_model(cfg.model, weights=False), model)
