"""Checks that a resumed run uses the model of its checkpoint, by comparing both config.json files.

Owns which fields of a model's configuration count. A family's are compared as this version reads them, so that another
spelling of the same value is no difference; any other model's as they stand in config.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megaswift.errors import CheckpointError, Problem, WeightsError
from megaswift.folders.checkpoint import MODEL
from megaswift.models.family import FAMILIES, family_of, read_config_json

CONFIG = "config.json"
_NOT_SPEC = {"dtype", "new_head_std", "max_positions", "hf_config", "head", "labels", "features.padding_token"}
"""Fields of a `ModelSpec` that do not change the function, or differ for reasons of their own: the labels of a
classifier may be those of its rows, which have not been read yet."""
_NOT_CONFIG = {
    "_attn_implementation",
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "auto_map",
    "chunk_size_feed_forward",
    "dtype",
    "id2label",
    "initializer_range",
    "label2id",
    "max_position_embeddings",
    "num_labels",
    "problem_type",
    "quantization_config",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""Such fields of a config.json."""
_TRAINING = (
    "dropout",
    "loss_coef",
    "token_id",
    "init_method",
    "bias_update_rate",
    "output_attentions",
    "output_hidden",
)
"""In the names of fields that matter in training, generation or reporting only."""


def model_difference_problems(step: Path, config: Mapping[str, Any]) -> list[Problem]:
    """Report the fields in which the model of a step and the model of `config` compute another function."""
    folder = step / MODEL
    if not (folder / CONFIG).is_file():
        return []
    saved = read_config_json(folder)
    then = _fields(saved)
    now = _fields(config)
    if then is None or now is None:
        then = dict(_flat(saved))
        now = dict(_flat(config))
    differing = sorted(name for name in then.keys() | now.keys() if _counts(name) and then.get(name) != now.get(name))
    return [
        Problem(
            f"model's {name}",
            f"is {then.get(name)} in the checkpoint and {now.get(name)} in --model",
            f"use --model {folder}, or the checkpoint's model",
        )
        for name in differing
    ]


def refuse_other_model(step: Path, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError with every such field."""
    if problems := model_difference_problems(step, config):
        raise CheckpointError(problems)


def _fields(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """By a family's table; None where it is no family's."""
    if str(config.get("model_type")) not in FAMILIES:
        return None
    try:
        return dict(_flat(family_of(config).spec(config).to_dict()))
    except WeightsError:
        return None


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """`rope.base` -> 10000.0 and so on."""
    for key, value in values.items():
        name = f"{before}{key}"
        if name == "hf_config":
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif value is not None:
            yield name, list(value) if isinstance(value, tuple) else value


def _counts(name: str) -> bool:
    *_, last = parts = name.split(".")
    ignored = name in _NOT_SPEC or not _NOT_CONFIG.isdisjoint(parts)  # id2label.0
    return not ignored and not any(word in last for word in _TRAINING)
