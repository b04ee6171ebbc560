"""What `--rope_scaling` and `--new_special_tokens` make of a model: its config.json, tokenizer and spec, before a file
is written."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megaswift.config import SwiftConfig
from megaswift.data.model_tokenizer import named_special_tokens
from megaswift.errors import ConfigError, Problem
from megaswift.folders.checkpoint import find_checkpoint
from megaswift.models.family import read_config_json
from megaswift.models.options.model import ModelConfig
from megaswift.models.rope_scaling import config_with_rope_scaling
from megaswift.models.vision import has_vision_tower

BASE = "base_model"
"""Folder of the changed model in the output directory."""
ADAPTER = "initial_adapter"
"""Folder of the adapter that `--init_weights` makes."""
RESIDUAL = "residual_model"
"""Folder of the base model without that adapter."""


def changes_model(model: ModelConfig) -> bool:
    """Return whether the run starts from a model that differs from the folder's."""
    return model.rope_scaling is not None or bool(model.new_special_tokens)


def changed_config_and_tokenizer(cfg: SwiftConfig, folder: Path) -> tuple[dict[str, Any], Any]:
    """Return config.json and the tokenizer; None where the tokenizer is the folder's own. ConfigError where the model
    cannot be changed."""
    raw = read_config_json(folder)
    flag = "--rope_scaling" if cfg.model.rope_scaling is not None else "--new_special_tokens"
    if has_vision_tower(raw):
        raise ConfigError(Problem(flag, "needs a language model; this is a vision-language model", "leave it out"))
    if find_checkpoint(folder) is not None:
        fix = "megaswift convert megatron-to-hf STEP DIR, then --model DIR"
        raise ConfigError(Problem(flag, "needs a Hugging Face folder; --model is a checkpoint", fix))
    config = dict(raw)
    tokenizer = None
    if cfg.model.rope_scaling is not None:
        config = config_with_rope_scaling(config, cfg.model.rope_scaling, cfg.data.max_length)
    if tokens := named_special_tokens(cfg.model.new_special_tokens):
        from megaswift.bridge.hf.base_model import tokenizer_with_tokens  # loads torch

        tokenizer = tokenizer_with_tokens(folder, cfg.model.trust_remote_code, tokens)
        config["vocab_size"] = max(int(raw.get("vocab_size") or 0), len(tokenizer))
    return config, tokenizer


@contextmanager
def changed_config_folder(cfg: SwiftConfig, folder: Path) -> Iterator[Path]:
    """Yield `folder`, or a temporary folder for the block with the changed config.json and links to its other files."""
    if not changes_model(cfg.model):
        yield folder
        return
    config, _ = changed_config_and_tokenizer(cfg, folder)
    with tempfile.TemporaryDirectory(prefix="megaswift-") as name:
        for path in folder.iterdir():
            if path.is_file() and path.name != "config.json":
                (Path(name) / path.name).symlink_to(path.resolve())
        (Path(name) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield Path(name)
