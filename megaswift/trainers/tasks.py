"""The tasks: what each trains on and by which objective. A new one is a new row here, its loss and its entry point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megaswift.losses.contract import Loss
from megaswift.losses.sft import CrossEntropy
from megaswift.registry import Registry


@dataclass(frozen=True)
class Task:
    """One task of the command line."""

    name: str
    title: str
    loss: Callable[[], Loss]
    count: str
    """The count of the loss by which means over several steps are weighed."""
    unit: str
    """What `global_batch_size` counts."""


TASKS: Registry[Task] = Registry("task")
TASKS.register("sft", Task("sft", "supervised fine-tuning", CrossEntropy, "label_weight", "rows"))
TASKS.register("pt", Task("pt", "pretraining", CrossEntropy, "label_weight", "rows"))
