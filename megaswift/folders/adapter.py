"""What an adapter folder says of itself. No torch, no peft."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from megaswift.base.plain_files import read_plain_file
from megaswift.errors import Problem

CONFIG = "adapter_config.json"
"""What makes a folder one."""
TENSORS = "adapter_model.safetensors"
CLASSIFIER_TASK = "SEQ_CLS"
"""PEFT's task type of a classifier or reward model."""
LANGUAGE_TASK = "CAUSAL_LM"
"""PEFT's task type of a language model."""


def _said(adapter: Path, name: str) -> str:
    try:
        return str(json.loads(read_plain_file(adapter / CONFIG).decode("utf-8"))[name] or "")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


def adapter_peft_type_or_lora(adapter: Path) -> str:
    """peft_type of an adapter folder in small letters; LoRA where it cannot be told, whose reader says what is
    wrong."""
    return _said(adapter, "peft_type").lower() or "lora"


def is_reward_model_adapter(adapter: Path) -> bool:
    """Whether its adapters are a reward model's, which have its head beside them."""
    return _said(adapter, "task_type") == CLASSIFIER_TASK


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
