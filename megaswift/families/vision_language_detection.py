"""Vision-language models, as far as a config.json tells: they train on the torch engine, whole, images and all. No
torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megaswift.errors import Problem


def has_vision_tower(hf_config: Mapping[str, Any]) -> bool:
    """Whether a model looks at images: transformers keeps a tower's configuration apart."""
    return isinstance(hf_config.get("vision_config"), Mapping)


def vision_language_problem(hf_config: Mapping[str, Any], families: Collection[str]) -> Problem:
    """Why the native engine does not train this vision-language model, and what does.

    `families`: model types of the native engine. Only where the model's language model is one of them is there an
    engine that divides it by tensor, pipeline, context or expert parallelism.
    """
    text = hf_config.get("text_config")
    language_model = str(text.get("model_type")) if isinstance(text, Mapping) else ""
    whole = (
        "for sft use --engine fsdp2 or zero3, which train the whole model and divide its weights over the ranks (or "
        "ddp, zero2), without tensor, pipeline, context or expert parallelism"
    )
    parallel = (
        f"; for these, and for other tasks, use a folder with its language model alone (model_type {language_model})"
        if language_model in families
        else ": no engine has these for this model; other tasks need a language model"
    )
    return Problem(
        f"config.json, model_type {hf_config.get('model_type')!r}",
        "is a vision-language model, but --engine megatron trains only language models",
        whole + parallel,
    )
