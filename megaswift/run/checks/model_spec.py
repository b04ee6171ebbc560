"""The model spec for a task: of a family, or of any transformers model that has the class that a torch engine loads;
with a scalar head for reward models."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaswift.config import SwiftConfig
from megaswift.engine.options.engine_checks import capabilities_of
from megaswift.errors import ConfigError, Problem, WeightsError
from megaswift.families import FAMILIES, ModelSpec, family_of, load_spec
from megaswift.losses.options.classification import default_problem_type
from megaswift.models.any_model import spec_from_family_or_size_fields
from megaswift.models.encoders import is_encoder
from megaswift.models.family import (
    read_config_json,
    rope_and_epsilon_problems,
    trains_language_model,
    unreadable_value_problems,
)
from megaswift.models.heads import SUFFIXES, class_names_of, scalar_head_problems, with_head, with_scalar_head
from megaswift.models.options.model import ModelConfig
from megaswift.models.spec import NO_HEAD, SCORE, TOKEN_SCORE, VOCABULARY
from megaswift.models.vision import has_vision_tower
from megaswift.options.tasks import CLASSIFIERS, RETRIEVAL
from megaswift.run.checks.changed_model import changed_config_folder
from megaswift.run.checks.encoders import encoder_problems

UNKNOWN_LABELS = 2
"""Classes of a model before its rows have been read, where no option names their number."""


def model_spec_for_task(cfg: SwiftConfig, folder: Path) -> ModelSpec:
    """Return the model that the folder's config.json describes; ConfigError where the task cannot use it."""
    raw = read_config_json(folder)
    if unfit := [*rope_and_epsilon_problems(raw), *unreadable_value_problems(raw)]:
        raise WeightsError(unfit)
    if unfit := encoder_problems(cfg, raw):
        raise ConfigError(unfit)
    with changed_config_folder(cfg, folder) as changed:
        tables = capabilities_of(cfg).family_tables and not is_encoder(raw)
        spec = load_spec(changed) if tables else spec_from_family_or_size_fields(changed)
    spec = _with_trained_mtp(cfg, spec)
    if cfg.task == "rm" and trains_language_model(raw) and capabilities_of(cfg).family_tables:
        rule = "is a vision-language model, which rm does not support"
        raise ConfigError(Problem(f"--model {cfg.model.model}", rule, "use a folder with its language model alone"))
    if cfg.task == "rm":
        if spec.head != VOCABULARY:
            unfit = scalar_head_problems(f"--model {cfg.model.model}", spec.hf_config)
            if unfit:
                raise ConfigError(unfit)
        return _with_known_score(with_scalar_head(spec))
    if cfg.task in RETRIEVAL:
        return _for_retrieval(cfg, spec, raw)
    if cfg.task in CLASSIFIERS:
        if trains_language_model(raw):
            rule = f"is a vision-language model, which {cfg.task} does not support"
            raise ConfigError(Problem(f"--model {cfg.model.model}", rule, "use a folder with its language model alone"))
        return _with_classes(cfg, spec)
    if spec.head != VOCABULARY:
        scalar = spec.head == SCORE and spec.labels == 1
        named = "a reward model" if scalar else "a classifier" if spec.scored else "a model without its output layer"
        raise ConfigError(
            Problem(
                f"--model {cfg.model.model}",
                f"is {named}, but {cfg.task} needs a language model",
                "use the language model that it was trained from",
            )
        )
    return spec


def _for_retrieval(cfg: SwiftConfig, spec: ModelSpec, raw: Mapping[str, Any]) -> ModelSpec:
    """Return the model without a head for embeddings, with a head of one number for rerankers, or as it is."""
    label = f"--model {cfg.model.model}"
    if trains_language_model(raw):
        rule = f"is a vision-language model, which {cfg.task} does not support"
        raise ConfigError(Problem(label, rule, "use a folder with its language model alone"))
    if cfg.task == "embedding":
        if spec.scored:
            rule = "is a classifier; embeddings are made of the hidden states of a language model"
            raise ConfigError(Problem(label, rule, "use the language model that it was trained from"))
        return with_head(spec, NO_HEAD)
    if cfg.task == "reranker":
        if spec.head == VOCABULARY or (spec.head == SCORE and spec.labels == 1):
            return _with_known_score(with_scalar_head(spec))
        rule = "is no language model and no reranker (a ...ForSequenceClassification with one label)"
        raise ConfigError(Problem(label, rule, "use a language model, or a reranker"))
    if spec.head != VOCABULARY:
        rule = "has no output layer over the vocabulary, whose logits of two tokens are the score"
        raise ConfigError(Problem(label, rule, "use a language model, or --task_type reranker"))
    return spec


def _with_classes(cfg: SwiftConfig, spec: ModelSpec) -> ModelSpec:
    """Return the model with a classifier's head; one that it has already stays."""
    data = cfg.data
    kind = TOKEN_SCORE if cfg.task == "token_cls" else SCORE
    label = f"--model {cfg.model.model}"
    dropout = spec.hf_config.get("classifier_dropout")
    if kind == TOKEN_SCORE and dropout and not is_encoder(spec.hf_config):
        rule = f"is {dropout}, but dropout before a classifier's head is not supported"
        raise ConfigError(Problem("classifier_dropout of config.json", rule, "set it to 0 there"))
    names: Sequence[str] = data.class_names or [f"LABEL_{i}" for i in range(data.num_labels or UNKNOWN_LABELS)]
    if spec.head == kind:
        if data.named_labels not in (None, spec.labels):
            rule = f"is a classifier with {spec.labels} classes, but the options name {data.named_labels}"
            raise ConfigError(Problem(label, rule, "use the language model that it was trained from"))
        names = data.class_names or class_names_of(spec.hf_config)
    elif spec.head != VOCABULARY:
        other = "of texts" if spec.head == SCORE else "of tokens"
        what = f"a classifier {other}" if spec.scored else "a model without its output layer"
        rule = f"is {what}, but {cfg.task} needs a language model, or a classifier of its own kind"
        raise ConfigError(Problem(label, rule, "use the language model that it was trained from"))
    changed = with_head(spec, kind, names)
    known = _with_known_score(changed, kind, cfg.task)
    if kind == TOKEN_SCORE:
        return known
    problem = data.problem_type or spec.hf_config.get("problem_type") or default_problem_type(len(names))
    return replace(known, hf_config={**known.hf_config, "problem_type": problem})


def _with_trained_mtp(cfg: SwiftConfig, spec: ModelSpec) -> ModelSpec:
    """Return the model with as many trained layers for multi-token prediction as the run asks for."""
    layers = cfg.model.mtp_num_layers or 0
    if not layers or not capabilities_of(cfg).family_tables:
        return replace(spec, features=replace(spec.features, mtp_layers=0))
    table = family_of(spec.hf_config).mtp
    option = f"--mtp_num_layers {layers}"
    if table is None:
        have = ", ".join(name for name in FAMILIES.names() if FAMILIES.get(name).mtp is not None)
        rule = f"{spec.family} has no layers for multi-token prediction that can be trained; {have} have"
        raise ConfigError(Problem(option, rule, "leave it out"))
    stored = table.stored_layers(spec)
    if stored != layers or (table.most or layers) < layers:
        field = " or ".join(table.count)
        rule = f"config.json says that the model has {stored} such layers ({field}), and they train together"
        fix = f"--mtp_num_layers {stored}" if stored and stored <= (table.most or stored) else "leave it out"
        raise ConfigError(Problem(option, rule, fix))
    return replace(spec, features=replace(spec.features, mtp_layers=layers))


_OTHER_MODEL = "use a model that AutoModelForCausalLM or AutoModelForImageTextToText of transformers loads"


def _with_known_score(spec: ModelSpec, head: str = SCORE, task: str = "rm") -> ModelSpec:
    from transformers.models.auto import modeling_auto

    known = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    if head == TOKEN_SCORE:
        known = modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES
    kind = str(spec.hf_config.get("model_type"))
    if kind not in known:
        what = "reward model" if task == "rm" else "classifier"
        rule = f"transformers has no ...{SUFFIXES[head]} of model_type {kind}, so the {what} could not be loaded"
        raise ConfigError(Problem(task, rule, "use a model of another family"))
    return spec


def transformers_class_problems(model: ModelConfig, spec: ModelSpec) -> list[Problem]:
    """Report a model that is no family here and for which transformers has no class that torch engines could load."""
    kind = str(spec.hf_config.get("model_type"))
    code = spec.hf_config.get("auto_map")
    if kind in FAMILIES or spec.scored or is_encoder(spec.hf_config):
        return []
    if isinstance(code, Mapping) and (model.trust_remote_code or kind not in _transformers_model_types()):
        auto = "AutoModelForImageTextToText" if has_vision_tower(spec.hf_config) else "AutoModelForCausalLM"
        if auto not in code:
            rule = f"is Python code in the folder without a class for {auto}"
            return [Problem(f"config.json, model_type {kind!r}", rule, _OTHER_MODEL)]
        if not model.trust_remote_code:
            rule = "is Python code in the folder, which runs only with trust_remote_code"
            return [Problem(f"config.json, model_type {kind!r}", rule, "--trust_remote_code true")]
        return []
    from transformers.models.auto import modeling_auto

    known = (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        if has_vision_tower(spec.hf_config)
        else modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    if kind in known:
        return []
    rule = "is not a language or vision-language model of the installed transformers"
    return [Problem(f"config.json, model_type {kind!r}", rule, _OTHER_MODEL)]


def _transformers_model_types() -> Collection[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return CONFIG_MAPPING_NAMES
