"""What models say of completions that are already written, token by token, by the engine that trains.

Owns the way from completions to micro-batches and back: each data-parallel rank scores its own, and every rank gets all
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megaswift import distributed
from megaswift.data.rollout_batches import RolloutCollator, RolloutMicrobatch, gather_values
from megaswift.engine.protocol import Engine
from megaswift.losses.contract import Needs

CompletionScores = dict[int, np.ndarray]
"""float32 [own tokens] of each completion, by its number."""


def token_numbers(
    engine: Engine, micros: Sequence[RolloutMicrobatch], layout: RolloutCollator, needs: Needs, first: bool
) -> CompletionScores:
    """The one output that `needs` names, of all ranks' completions. `first`: this rank speaks for its data-parallel
    replica. Collective."""
    (name,) = needs.names
    batches = layout.batches(micros)
    scores: CompletionScores = {}
    for batch, outputs, micro in zip(batches, engine.score(batches, needs), micros, strict=True):
        scores |= gather_values(batch, getattr(outputs, name), micro)
    return distributed.all_gather_dict(scores if first else {})
