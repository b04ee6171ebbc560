"""The model spec for a task: of a family, or of any transformers model; with a scalar head for reward models."""

from __future__ import annotations

from pathlib import Path

from megaswift.config import SwiftConfig
from megaswift.config.engine_rules import capabilities_of
from megaswift.errors import ConfigError, Problem, WeightsError
from megaswift.families import ModelSpec, load_spec
from megaswift.families.family import read_config_json, rope_and_epsilon_problems
from megaswift.families.model_spec_of_any_model import spec_from_family_or_size_fields
from megaswift.families.scalar_head import with_scalar_head
from megaswift.trainers.rope_scaling_and_new_tokens import changed_config_folder


def model_spec_for_task(cfg: SwiftConfig, folder: Path) -> ModelSpec:
    """What the folder's config.json describes; ConfigError where the task cannot use it."""
    if unfit := list(rope_and_epsilon_problems(read_config_json(folder))):
        raise WeightsError(unfit)
    with changed_config_folder(cfg, folder) as changed:
        spec = load_spec(changed) if capabilities_of(cfg).family_tables else spec_from_family_or_size_fields(changed)
    if cfg.task == "rm":
        return _with_known_score(with_scalar_head(spec))
    if spec.scored:
        raise ConfigError(
            Problem(
                f"--model {cfg.model.model}",
                f"is a reward model, but {cfg.task} needs a language model",
                "use the language model that it was trained from",
            )
        )
    return spec


def _with_known_score(spec: ModelSpec) -> ModelSpec:
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as KNOWN  # noqa: N811

    kind = str(spec.hf_config.get("model_type"))
    if kind not in KNOWN:
        raise ConfigError(
            Problem(
                "rm",
                f"transformers has no ...ForSequenceClassification of model_type {kind}, so the reward model could "
                "not be loaded",
                "use a model of another family",
            )
        )
    return spec
