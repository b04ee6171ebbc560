"""Models that end in one number a token instead of the vocabulary: reward models, critics, transformers'
`...ForSequenceClassification`.

Owns what of a config.json says so, and how a language model becomes one. Its weight is a row of
`weights.blocks.HEAD`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megaswift.errors import Problem, WeightsError
from megaswift.models.spec import SCORE, ModelSpec

LANGUAGE = "ForCausalLM"
CLASSIFIER = "ForSequenceClassification"


def has_scalar_head(config: Mapping[str, Any]) -> bool:
    """Whether config.json is of a classifier; WeightsError where it has more than one label."""
    architectures = config.get("architectures") or []
    if not (isinstance(architectures, list) and any(str(a).endswith(CLASSIFIER) for a in architectures)):
        return False
    labels = len(config.get("id2label") or {}) or config.get("num_labels", 2)
    if labels != 1:
        raise WeightsError(
            Problem(
                "config.json",
                f"describes a classifier with {labels} labels; a reward model has one",
                "use num_labels=1, or the language model itself",
            )
        )
    return True


def scalar_head_problems(flag: str, config: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with a model that is to score texts."""
    if has_scalar_head(config):
        return []
    return [
        Problem(
            flag,
            "is not a reward model: its config.json does not name a ...ForSequenceClassification",
            "train one with megaswift rm",
        )
    ]


def config_without_scalar_head(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The config.json of the language model under the head."""
    return {**config, "architectures": [architecture]}


def with_scalar_head(spec: ModelSpec) -> ModelSpec:
    """The same model with a scalar head in place of the vocabulary's; one that has it stays as it is."""
    return (
        spec
        if spec.scored
        else replace(spec, head=SCORE, tied=False, hf_config=config_with_scalar_head(spec.hf_config))
    )


def config_with_scalar_head(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a language model as that of its classifier with one label."""
    names = [str(a).replace(LANGUAGE, CLASSIFIER) for a in config.get("architectures") or []]
    return {**config, "architectures": names, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def with_pad_token_id(config: Mapping[str, Any], padding: int) -> dict[str, Any]:
    """The config.json of a classifier with a pad_token_id, by which transformers finds the last token of a padded
    row."""
    changed = {**config, "pad_token_id": padding}
    inner = config.get("text_config")  # of a vision-language model: transformers reads it there
    return {**changed, "text_config": {**inner, "pad_token_id": padding}} if isinstance(inner, dict) else changed
