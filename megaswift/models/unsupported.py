"""Model types that no engine trains although their folders look like models: what they are, and which model to take.

Owns the table. Model types that are not in it are decided by their fields and by transformers' classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megaswift.errors import Problem

_SPEECH = "has audio inputs or outputs, which are not supported: megaswift trains on text and images"
UNSUPPORTED_MODEL_TYPES: Mapping[str, tuple[str, str]] = {
    "internvl_chat": (
        "is InternVL in its original layout, whose model is Python code in the folder; megaswift trains InternVL in "
        "the layout of transformers (model_type internvl)",
        "use a checkpoint of that layout, such as OpenGVLab/InternVL3-8B-hf or OpenGVLab/InternVL2_5-8B-MPO-hf",
    ),
    "qwen2_5_omni": (_SPEECH, "use a vision-language model, such as Qwen/Qwen2.5-VL-7B-Instruct"),
    "qwen3_omni_moe": (_SPEECH, "use a vision-language model, such as Qwen/Qwen3-VL-30B-A3B-Instruct"),
    "qwen2_audio": (_SPEECH, "use a language model, such as Qwen/Qwen2.5-7B-Instruct"),
    "minicpmo": (_SPEECH, "use a vision-language model, such as Qwen/Qwen2.5-VL-7B-Instruct"),
}
"""model_type of config.json -> a rule and a fix."""


def unsupported_model_type_problem(config: Mapping[str, Any]) -> Problem | None:
    """Why no engine trains the model of this config.json; None for a type that is not in the table."""
    name = config.get("model_type")
    row = UNSUPPORTED_MODEL_TYPES.get(str(name))
    return None if row is None else Problem(f"config.json, model_type {name!r}", *row)
