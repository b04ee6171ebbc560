"""`--rope_scaling` and `--new_special_tokens` of `infer` and `deploy`.

Owns the scaled configuration of a loaded model, and the check that the tokenizer has the tokens: rows of an embedding
that no run has trained are not made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megaswift.config.inference.options import ModelLoadingOptions
from megaswift.data.model_tokenizer import named_special_tokens
from megaswift.errors import ConfigError, Problem
from megaswift.models.family import read_config_json
from megaswift.models.rope_scaling import config_with_rope_scaling
from megaswift.models.vision import has_vision_tower


def with_rope_scaling(config: Any, folder: Path, option: str | None, max_length: int | None) -> Any:
    """transformers' configuration with the scaling, as training with the same option has it."""
    if option is None:
        return config
    raw = read_config_json(folder)
    if has_vision_tower(raw):
        rule = "needs a language model; this is a vision-language model"
        raise ConfigError(Problem(f"--rope_scaling {option}", rule, "leave it out"))
    return type(config).from_dict(config_with_rope_scaling(raw, option, max_length))


def check_tokens_exist(tokenizer: Any, options: ModelLoadingOptions) -> None:
    """ConfigError where the tokenizer lacks one of the new special tokens."""
    known = tokenizer.get_vocab()
    lacking = [token for token in named_special_tokens(options.new_special_tokens) if token not in known]
    if lacking:
        raise ConfigError(
            Problem(
                f"--new_special_tokens {' '.join(lacking)}",
                f"the tokenizer of --model {options.model} lacks them: the model has no trained weights for them",
                "give the model that was trained with them: OUT/hf, or OUT/base_model with --adapters OUT/adapter",
            )
        )
