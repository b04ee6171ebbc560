"""Checks of a model for generation that need only file names and configurations: errors are reported before torch is
imported. No torch.

Owns finding the folder and what is wrong with it; `model.py` looks again when it prepares the
model, for callers that come past here.
"""

from __future__ import annotations

import importlib.util
from dataclasses import fields
from pathlib import Path
from typing import Any

from megaswift.data.templates.chosen import check_template, read_system_message
from megaswift.errors import ConfigError, Problem, WeightsError
from megaswift.folders.adapter import classifier_head_of_adapter, head_kind_of_adapter
from megaswift.folders.checkpoint import find_checkpoint
from megaswift.folders.saved_steps import refuse_damaged_part
from megaswift.folders.source import locate_model, missing_model_file_problems
from megaswift.inference.options.commands import CommonInferenceConfig, ModelLoadingOptions
from megaswift.inference.pooling.folder import SEQUENCE, PoolingFolder, pooling_folder
from megaswift.models.family import read_config_json
from megaswift.models.heads import has_scalar_head
from megaswift.models.model_type import model_type_option_mismatch_problems
from megaswift.models.quantized_training import quantization_package_problems


def require_package(package: str, why: str) -> None:
    """ConfigError where a package of an extra is missing."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(Problem(why, f"requires the package {package}", f"run pip install {package}"))


def precheck_model(cfg: CommonInferenceConfig) -> None:
    """The model's folder, adapters, chat template and system message, as far as they can be judged at once."""
    locate_generation_model(cfg.weights)
    if cfg.conversation.chat_template is not None:
        check_template(cfg.conversation.chat_template)
    read_system_message(cfg.conversation.system)


def locate_pooling_model(cfg: CommonInferenceConfig) -> tuple[Path, PoolingFolder] | None:
    """Return the folder of a model that gives vectors, scores or classes, and what it says; None for a language
    model."""
    weights = cfg.weights
    label = f"--model {weights.model}"
    folder = locate_model(weights)
    heads = [classifier_head_of_adapter(Path(adapters)) for adapters in weights.adapter_folders]
    found = pooling_folder(folder, cfg.pooling, label, next((head for head in heads if head is not None), None))
    if found is None:
        return None
    require_package("accelerate", "inference")
    for adapters in weights.adapter_folders:
        require_package("peft", f"--adapters {adapters}")
        refuse_damaged_part(Path(adapters))
    config = read_config_json(folder)
    problems = missing_model_file_problems(folder, random_init=False)
    problems += model_type_option_mismatch_problems(weights.model_type, config)
    problems += quantization_package_problems(config, label)
    if any(name for name, _ in weights.named_adapters):
        rule = "adapters that requests select by name are not supported for embeddings, scores and classes"
        problems.append(Problem("--adapters", rule, "give one folder without a name"))
    problems += _text_option_problems(cfg, found)
    if problems:
        raise WeightsError(problems)
    return folder, found


def _text_option_problems(cfg: CommonInferenceConfig, found: PoolingFolder) -> list[Problem]:
    """Options that only a model that generates text reads."""
    talk = ("chat_template", "agent_template", "enable_thinking") + (("system",) if found.kind != SEQUENCE else ())
    sections: list[tuple[Any, tuple[str, ...]]] = [
        (cfg.generation, tuple(field.name for field in fields(cfg.generation))),
        (cfg.conversation, talk),
        (getattr(cfg, "file", None), ("logprobs", "top_logprobs")),
        (getattr(cfg, "server", None), ("max_logprobs",)),
        (cfg.weights, ("rope_scaling", "new_special_tokens")),
    ]
    rule = f"has no effect on a model that generates no text ({found.kind})"
    return [
        Problem(f"--{name} {getattr(section, name)}", rule, "leave it out")
        for section, names in sections
        for name in names
        if section is not None and getattr(section, name) != getattr(type(section)(), name)
    ]


def locate_generation_model(options: ModelLoadingOptions) -> Path:
    """The folder of the model, fetched where it is a hub's; an error where it cannot be one that answers."""
    require_package("accelerate", "inference")
    for adapters in options.adapter_folders:
        require_package("peft", f"--adapters {adapters}")
        refuse_damaged_part(Path(adapters))
    folder = locate_model(options)
    problems = missing_model_file_problems(folder, random_init=False) + _judges(folder, options)
    problems += model_type_option_mismatch_problems(options.model_type, read_config_json(folder))
    if find_checkpoint(folder) is None:
        problems += quantization_package_problems(read_config_json(folder), f"--model {options.model}")
    if problems:
        raise WeightsError(problems)
    return folder


def _judges(folder: Path, options: ModelLoadingOptions) -> list[Problem]:
    """Reward models, which transformers would give an untrained or the base model's vocabulary head, and let write."""
    rule = "is a reward model, which does not generate text"
    fix = "use it as --reward_model of megaswift grpo"
    problems = [Problem(f"--model {options.model}", rule, fix)] if has_scalar_head(read_config_json(folder)) else []
    judging = rule.replace("is", "is of", 1)
    problems += [
        Problem(f"--adapters {folder}", judging, f"merge them into the model, then {fix}")
        for folder in options.adapter_folders
        if head_kind_of_adapter(Path(folder)) is not None
    ]
    return problems
