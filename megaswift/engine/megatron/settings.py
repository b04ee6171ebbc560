"""What the native engine reads of a run beside the options of its model, layout, optimizer and adapters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineSettings:
    """Values that the builder of a run works out from several options."""

    seed: int
    save_rng: bool
    """Whether checkpoints have the random states of every rank."""
    deterministic: bool
    shares_rows: bool
    """Whether a row of a batch holds several documents."""
    full_microbatch_tokens: int
    """Tokens of a micro-batch on one context-parallel rank whose rows are padded to the maximum length."""
    trains: bool = True
    """Whether the weights train; False for a teacher, which has neither gradients nor an optimizer."""
