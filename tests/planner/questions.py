"""Runs of published models as questions for the planner."""

from __future__ import annotations

from typing import Any

from megaswift.config import SwiftConfig
from megaswift.families import family_of
from megaswift.models.published.sizes import MODELS
from megaswift.models.spec import ModelSpec
from megaswift.parallel.hardware import planned_gpu
from megaswift.planner.machine import Machine

H100 = Machine(planned_gpu("h100"), 8)
H200 = Machine(planned_gpu("h200"), 8)


def spec_of(name: str) -> ModelSpec:
    config = MODELS[name][0]
    return family_of(config).spec(config)


def run_of(name: str, **options: Any) -> SwiftConfig:
    return SwiftConfig(model=name, **{"task": "sft", "max_length": 4096, **options})
