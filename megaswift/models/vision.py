"""Vision-language models, as far as a config.json tells: they train on the torch engine, whole, images and all. No
torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megaswift.config.sections import Sections
from megaswift.engine.options.engine_checks import capabilities_of
from megaswift.errors import Problem
from megaswift.options.tasks import VISION_TASKS

PACKED = ("idefics3", "internvl", "llava", "llava_next", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe")
"""Model types whose packed documents have the loss and gradients of separate ones (`tests/parity/test_vision.py`).
Gemma 3's do not."""
PACKED_TEXT = ("llama", "mistral", "qwen2", "qwen3")
"""Model types of language models in them; beside their own, as `qwen2_vl_text`."""


def vision_packing_problems(hf_config: Mapping[str, Any], task: str) -> list[Problem]:
    """Why documents with images cannot share a row (`--packing true`) of this vision-language model; none where they
    can."""
    kind = hf_config.get("model_type")
    text = hf_config.get("text_config")
    language_model = text.get("model_type", f"{kind}_text") if isinstance(text, Mapping) else f"{kind}_text"
    if task != "sft":
        rule = f"{task} does not pack rows with images; only sft does"
    elif kind not in PACKED or language_model not in (*PACKED_TEXT, f"{kind}_text"):
        rule = (
            f"is not supported by this model (model_type {kind}, language model {language_model}): documents with "
            f"images are known to stay separate in {', '.join(PACKED)}, with {', '.join(PACKED_TEXT)} or their own"
        )
    else:
        return []
    return [Problem("--packing true", rule, "--packing false")]


def vision_task_problems(hf_config: Mapping[str, Any], model: str, task: str) -> list[Problem]:
    """Why a task does not train `--model MODEL`; none where it does, or the model reads only text."""
    if task in VISION_TASKS or not has_vision_tower(hf_config):
        return []
    rule = f"is a vision-language model, which {task} does not support"
    return [Problem(f"--model {model}", rule, f"use a language model, or one of the tasks {', '.join(VISION_TASKS)}")]


def has_vision_tower(hf_config: Mapping[str, Any]) -> bool:
    """Whether a model looks at images: transformers keeps a tower's configuration apart."""
    return isinstance(hf_config.get("vision_config"), Mapping)


def reads_images(c: Sections, hf_config: Mapping[str, Any]) -> bool:
    """Whether a run looks at images: the native engine trains the language model of a vision-language model alone."""
    return capabilities_of(c).vision and has_vision_tower(hf_config)


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
