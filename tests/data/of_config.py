"""What a whole configuration gives to the readers of data."""

from __future__ import annotations

from typing import Any

from megaswift.config import SwiftConfig
from megaswift.data.find_rows_held_out_by_training_run import validation_row_places
from megaswift.data.rl_prompts import Prompt, PromptSource, load_prompt_splits


def prompt_splits(cfg: SwiftConfig, reader: Any, per_generation: int) -> tuple[PromptSource, list[Prompt] | None]:
    completion = cfg.rl.max_completion_length
    return load_prompt_splits(cfg.data, cfg.train, reader, cfg.task, completion, per_generation)


def row_places(cfg: SwiftConfig, reader: Any) -> frozenset[str] | None:
    return validation_row_places(cfg.data, cfg.train, reader, cfg.task, cfg.rl.max_completion_length)
