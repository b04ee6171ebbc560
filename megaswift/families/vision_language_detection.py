"""Vision-language models, as far as a config.json tells: they train on the torch engine, whole, images and all. No
torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megaswift.errors import Problem

TEXT_ONLY = Problem(
    "",
    "is a vision-language model, but --engine megatron trains only language models",
    "for sft use --engine ddp, fsdp2 or zero2, which train the whole model; for other tasks use a folder with its "
    "language model alone (of Gemma 3, for example, model_type gemma3_text)",
)


def has_vision_tower(hf_config: Mapping[str, Any]) -> bool:
    """Whether a model looks at images: transformers keeps a tower's configuration apart."""
    return isinstance(hf_config.get("vision_config"), Mapping)
