"""Models that end in something else than the vocabulary: classifiers (of which a reward model and a critic are those
with one label), and models without a head, whose hidden states are embeddings.

Owns the parts of config.json that name a head, and how a language model becomes such a model. The weights of heads are
rows of `weights.blocks.HEAD`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megaswift.errors import Problem
from megaswift.models.encoders import is_encoder
from megaswift.models.spec import NO_HEAD, SCORE, TOKEN_SCORE, ModelSpec

NEW = "score.weight"
"""The weight of a classifier's head."""
BIAS = "score.bias"
LANGUAGE = "ForCausalLM"
CLASSIFIER = "ForSequenceClassification"
TOKEN_CLASSIFIER = "ForTokenClassification"
SUFFIXES = {SCORE: CLASSIFIER, TOKEN_SCORE: TOKEN_CLASSIFIER, NO_HEAD: "Model"}
"""The end of the name of transformers' class, by head."""
ENCODER_SUFFIXES = ("ForMaskedLM", "ForPreTraining")
"""The ends of the names of encoders as they were pretrained."""


def head_of(config: Mapping[str, Any], architecture: str = "") -> str | None:
    """Return the head that config.json describes, if it is not the vocabulary's: SCORE, TOKEN_SCORE or, where
    `architecture` names the family's language model, NO_HEAD."""
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        return None
    names = [str(name) for name in architectures]
    if architecture.endswith(LANGUAGE) and _renamed(architecture, NO_HEAD) in names:
        return NO_HEAD
    return next((kind for kind in (SCORE, TOKEN_SCORE) if any(name.endswith(SUFFIXES[kind]) for name in names)), None)


def head_names(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of the tensors of a classifier's head; none for other models."""
    if not spec.scored:
        return ()
    return (NEW, BIAS) if spec.score_bias else (NEW,)


def label_count(config: Mapping[str, Any]) -> int:
    """Return the number of labels that a model with a head gives; transformers takes 2 for a classifier whose
    config.json has none."""
    if head_of(config) is None:
        return 1
    return len(config.get("id2label") or {}) or int(config.get("num_labels", 2))


def class_names_of(config: Mapping[str, Any]) -> list[str]:
    """Return the names of the labels of a classifier, in order."""
    named = {int(number): str(name) for number, name in (config.get("id2label") or {}).items()}
    return [named.get(i, f"LABEL_{i}") for i in range(label_count(config))]


def has_scalar_head(config: Mapping[str, Any]) -> bool:
    """Return whether config.json describes a classifier of texts with one label."""
    return head_of(config) == SCORE and label_count(config) == 1


def scalar_head_problems(flag: str, config: Mapping[str, Any]) -> list[Problem]:
    """Report a model that is to score texts and cannot."""
    if has_scalar_head(config):
        return []
    if head_of(config) == SCORE:
        rule = f"is a classifier with {label_count(config)} labels; a reward model has one"
        return [Problem(flag, rule, "use num_labels=1, or the language model itself")]
    return [
        Problem(
            flag,
            "is not a reward model: its config.json does not name a ...ForSequenceClassification",
            "train one with megaswift rm",
        )
    ]


def config_of_language_model(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Return the config.json of the language model under a head."""
    return {**config, "architectures": [architecture]}


def with_head(spec: ModelSpec, kind: str, labels: Sequence[str] = ("LABEL_0",)) -> ModelSpec:
    """Return the same model with another head in place of the vocabulary's.

    Args:
        spec: A language model, or a model that has a head of this kind.
        kind: SCORE, TOKEN_SCORE or NO_HEAD.
        labels: The names of the labels of a classifier, in order.
    """
    config = config_with_head(spec.hf_config, kind, labels)
    return replace(spec, head=kind, labels=1 if kind == NO_HEAD else len(labels), tied=False, hf_config=config)


def with_classifier_head(
    spec: ModelSpec, kind: str, names: Sequence[str], problem_type: str | None = None
) -> ModelSpec:
    """Return the same model with the head of a classifier; a model with a head of one number stays as it is where the
    head has one number too.

    Args:
        spec: A language model, or a model with a head of this kind.
        kind: SCORE or TOKEN_SCORE.
        names: The names of the classes, in order.
        problem_type: The kind of label, for config.json.
    """
    if kind == SCORE and len(names) == 1 and problem_type is None:
        return with_scalar_head(spec)
    changed = with_head(spec, kind, names)
    config = {**changed.hf_config, **({"problem_type": problem_type} if problem_type else {})}
    return replace(changed, hf_config=config)


def with_scalar_head(spec: ModelSpec) -> ModelSpec:
    """Return the same model with a head of one number; a model that has it stays as it is."""
    return spec if spec.head == SCORE and spec.labels == 1 else with_head(spec, SCORE)


def config_with_head(config: Mapping[str, Any], kind: str, labels: Sequence[str] = ("LABEL_0",)) -> dict[str, Any]:
    """Return the config.json of a model as that of the model with a head; arguments as in `with_head`."""
    changed = {**config, "architectures": [_renamed(str(a), kind) for a in config.get("architectures") or []]}
    if kind == NO_HEAD:
        return changed
    changed["id2label"] = {str(i): name for i, name in enumerate(labels)}
    changed["label2id"] = {name: i for i, name in enumerate(labels)}
    changed.pop("num_labels", None)
    if kind == TOKEN_SCORE and not is_encoder(
        config
    ):  # without the field transformers drops a tenth of the head's inputs in training
        changed["classifier_dropout"] = 0.0
    return changed


def _renamed(architecture: str, kind: str) -> str:
    for suffix in (LANGUAGE, *ENCODER_SUFFIXES, *SUFFIXES.values()):
        if architecture.endswith(suffix):
            return architecture.removesuffix(suffix) + SUFFIXES[kind]
    return architecture


def with_pad_token_id(config: Mapping[str, Any], padding: int) -> dict[str, Any]:
    """Return the config.json of a classifier with a pad_token_id, by which transformers finds the last token of a
    padded row."""
    changed = {**config, "pad_token_id": padding}
    inner = config.get("text_config")  # of a vision-language model: transformers reads it there
    return {**changed, "text_config": {**inner, "pad_token_id": padding}} if isinstance(inner, dict) else changed
