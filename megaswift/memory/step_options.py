"""The options that decide how much memory a step needs on a device."""

from __future__ import annotations

from dataclasses import dataclass, field

from megaswift.engine.options.optimizer import OptimConfig
from megaswift.memory.objective import Objective
from megaswift.models.options.model import ModelConfig


@dataclass(frozen=True)
class StepOptions:
    """Options of model and optimizer, and the sizes of a step."""

    model: ModelConfig
    optim: OptimConfig
    distributed_optimizer: bool
    """Whether the optimizer's states are divided by the data-parallel ranks, where the optimizer allows it."""
    rows: int
    """Rows of a micro-batch, or pairs of answers; packed rows count as rows."""
    passes: int
    """Micro-batches of a step on each data-parallel rank."""
    max_length: int
    """Tokens of a row, as long as the data may be."""
    lora_dropout: float
    shares_rows: bool = False
    """Whether the documents of a micro-batch lie in one row."""
    objective: Objective = field(default_factory=Objective)
    device_memory: int = 0
    """Bytes of a GPU, of which vLLM takes a share."""
    overlap_experts: bool = False
    """Whether exchanges of tokens run behind the pass of another micro-batch."""
    expert_imbalance: float = 1.0
    """Tokens of the fullest expert-parallel rank over those of an even choice of experts."""
