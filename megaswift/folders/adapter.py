"""What an adapter folder says of itself. No torch, no peft."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megaswift.base.atomic_writes import write_atomically
from megaswift.base.plain_files import read_plain_file
from megaswift.errors import Problem
from megaswift.models.spec import NO_HEAD, SCORE, TOKEN_SCORE, VOCABULARY

CONFIG = "adapter_config.json"
"""What makes a folder one."""
TENSORS = "adapter_model.safetensors"
CLASSES = "classes.json"
"""The names of the classes of a classifier's adapters, as config.json has them: PEFT does not keep them."""
TASK_TYPES = {SCORE: "SEQ_CLS", TOKEN_SCORE: "TOKEN_CLS", NO_HEAD: "FEATURE_EXTRACTION", VOCABULARY: "CAUSAL_LM"}
"""PEFT's task type by the head of the model."""
_SCORES = re.compile(r"(base_model\.model\.)?(score|classifier)(\.modules_to_save)?(\.out_proj)?\.weight")
"""The name of the weight of a classifier's last layer in a folder of adapters; encoders have `classifier`."""


@dataclass(frozen=True)
class ClassifierHead:
    """The head of a classifier or reward model, whose adapters have it beside them."""

    kind: str
    """SCORE or TOKEN_SCORE."""
    names: tuple[str, ...]
    """Of its classes, in order."""
    problem_type: str | None = None
    named: bool = False
    """Whether the folder has the names."""


def _said(adapter: Path, name: str) -> str:
    try:
        return str(json.loads(read_plain_file(adapter / CONFIG).decode("utf-8"))[name] or "")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


def adapter_peft_type_or_lora(adapter: Path) -> str:
    """peft_type of an adapter folder in small letters; LoRA where it cannot be told, whose reader says what is
    wrong."""
    return _said(adapter, "peft_type").lower() or "lora"


def head_kind_of_adapter(adapter: Path) -> str | None:
    """Return the head of the classifier or reward model that the adapters belong to, SCORE or TOKEN_SCORE; None for
    those of other models."""
    task = _said(adapter, "task_type")
    return next((kind for kind in (SCORE, TOKEN_SCORE) if TASK_TYPES[kind] == task), None)


def classifier_head_of_adapter(adapter: Path) -> ClassifierHead | None:
    """Return the head of a classifier's adapters, with as many classes as its weight has rows; None for other
    adapters."""
    kind = head_kind_of_adapter(adapter)
    if kind is None:
        return None
    shapes = adapter_folder_tensor_shapes(adapter)
    count = next((shape[0] for name, shape in shapes.items() if _SCORES.fullmatch(name) and shape), 1)
    try:
        known = json.loads(read_plain_file(adapter / CLASSES).decode("utf-8"))
        names = tuple(str(known["id2label"][str(i)]) for i in range(count))
        return ClassifierHead(kind, names, known.get("problem_type"), True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ClassifierHead(kind, tuple(f"LABEL_{i}" for i in range(count)))


def write_classes(adapter: Path, config: Mapping[str, Any]) -> None:
    """Write the names of the classes in config.json beside adapters."""
    known = {name: config[name] for name in ("id2label", "problem_type") if name in config}
    write_atomically(adapter / CLASSES, json.dumps(known, indent=2, ensure_ascii=False) + "\n")


def base_model_name_or_empty(adapter: Path) -> str:
    """The model that the adapters were trained on, as their folder names it; empty where it does not."""
    return _said(adapter, "base_model_name_or_path")


def adapter_folder_tensor_shapes(adapter: Path) -> Mapping[str, tuple[int, ...]]:
    """Returns the shapes of its tensors, by name; empty where they cannot be read, which the code that loads them
    reports."""
    try:
        with safe_open(adapter / TENSORS, framework="np") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return {}


def resized_vocabulary_problem(what: str, theirs: int, ours: int) -> Problem:
    """Adapters that were trained on the model with another vocabulary."""
    rule = f"stores an embedding of {theirs} rows, the model has {ours}: its vocabulary was resized before training"
    return Problem(what, rule, "give the resized model: resize_token_embeddings and save_pretrained in transformers")


def adapter_given_as_model_problem(what: str, adapter: Path) -> Problem:
    """What is wrong with a folder given as a model that has nothing but these adapters."""
    base = base_model_name_or_empty(adapter) or "BASE"
    return Problem(what, "contains the adapters of a LoRA run, not a model", f"--model {base} --adapters {adapter}")
