"""A task of training: its loss, its data, and the engines and hooks that it has besides.

`build_run` calls `read` before a model is built, so that a malformed row costs no time, and `attach` once the engine
has its weights. `tasks.py` lists the tasks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megaswift.config import SwiftConfig
from megaswift.data.batches.loader import EvaluationSource
from megaswift.data.vision.processor import Processor
from megaswift.engine.protocol import Engine
from megaswift.evaluation.training import TrainingTasks
from megaswift.losses.contract import Loss
from megaswift.models.flops import StepFlopFormula
from megaswift.run.plan import RunPlan
from megaswift.run.summary import SummaryFacts
from megaswift.trainers.hook import BatchStream, Hook, Prepare, Rate, StepExtras, unchanged
from megaswift.trainers.hooks.evaluation import EvaluationMeasure
from megaswift.trainers.reference_logprobs import PrecomputedReferenceLogprobs


@dataclass(frozen=True)
class TaskData:
    """What a task has read, before a model is built."""

    source: Any
    """Batches to train on; of a policy, the prompts."""
    evaluation: EvaluationSource | None
    held_out: Sequence[Any] = ()
    """For a policy: the prompts to evaluate on."""
    tokenizer: Any = None
    processor: Processor | None = None
    """Reads images and texts of a vision-language model."""
    total_steps: int = 0
    eval_tasks: TrainingTasks | None = None
    """What --eval_tasks asks at each evaluation."""
    every_row_once: Mapping[bool, EvaluationSource] = field(default_factory=dict)
    """What a reference that is asked before training scores, by whether it is trained on."""
    reference: Mapping[bool, PrecomputedReferenceLogprobs] = field(default_factory=dict)
    """The reference's scores, where it was asked."""
    loss: Loss | None = None
    """The loss, where it depends on what was read; None: that of the task."""


@dataclass(frozen=True)
class TaskParts:
    """What a task adds to the engine and the hooks that every run has."""

    data: BatchStream
    first_hooks: Sequence[Hook] = ()
    """Called before those of every run."""
    last_hooks: Sequence[Hook] = ()
    """Called after them; the checkpoint's comes behind these."""
    prepare: Prepare = unchanged
    prepare_before_counts: bool = False
    agree_before_batch: bool = False
    step_extras: Callable[[], StepExtras] = StepExtras
    mark: Callable[[], Callable[[], None]] | None = None
    engines: Mapping[str, Engine] = field(default_factory=dict)
    """Others that are trained too, by their folder in a checkpoint."""
    flops: Sequence[StepFlopFormula] = ()
    """The formulas of these engines."""
    describe: Callable[[SummaryFacts], SummaryFacts] = lambda facts: facts
    """Completes the first screen. Collective."""


@dataclass(frozen=True)
class Task(ABC):
    """One task of the command line."""

    name: str
    title: str
    loss: Callable[[SwiftConfig], Loss]
    count: str
    """The count of the loss by which means over several steps are weighed."""
    unit: str
    """What `global_batch_size` counts."""
    scored: bool = False
    """The model ends in one number a conversation."""
    prompt_labels: bool = False
    """Prompts carry labels too."""

    @abstractmethod
    def read(self, plan: RunPlan) -> tuple[RunPlan, TaskData]:
        """Read the data, and return the plan with what depends on them. Collective."""

    def side_files(self, plan: RunPlan, tokenizer: Any) -> Mapping[str, str]:
        """Return the texts of further files beside an exported model, by path."""
        return {}

    def measure(self, plan: RunPlan) -> EvaluationMeasure | None:
        """Return what evaluation measures besides the loss, over all rows together."""
        return None

    @abstractmethod
    def attach(self, plan: RunPlan, data: TaskData, engine: Engine, rate: Rate) -> TaskParts:
        """Build what the task needs besides `engine`, which has its weights. `rate`: the schedule. Collective."""
