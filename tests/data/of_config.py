"""What a whole configuration gives to the readers of data."""

from __future__ import annotations

from typing import Any

from megaswift.config import SwiftConfig
from megaswift.data.prompts.source import Prompt, PromptSource, load_prompt_splits
from megaswift.data.sources.held_out import validation_row_places


def prompt_splits(cfg: SwiftConfig, reader: Any, per_generation: int) -> tuple[PromptSource, list[Prompt] | None]:
    completion = cfg.rollout.max_completion_length
    return load_prompt_splits(cfg.data, cfg.train, reader, cfg.task, completion, per_generation)


def row_places(cfg: SwiftConfig, reader: Any) -> frozenset[str] | None:
    return validation_row_places(cfg.data, cfg.train, reader, cfg.task, cfg.rollout.max_completion_length)
