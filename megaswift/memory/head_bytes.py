"""Memory of the vocabulary head for a micro-batch.

Owns one formula, that of `engine/megatron/layers/vocab_head.py`: logits in chunks of at most KEEP_BYTES of float32
probabilities, kept for the backward pass where one chunk holds the whole micro-batch. A head that computes otherwise
replaces `head_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.families.weight_table_on_ranks import padded_vocabulary_size
from megaswift.memory.microbatch_setup import MicrobatchSetup

KEEP_BYTES = 1 << 28


@dataclass(frozen=True)
class HeadBytes:
    """Bytes on a rank of the last pipeline stage."""

    kept: int
    """Between forward and backward pass."""
    working: int
    """At most beside these, within its forward or backward pass."""


def head_bytes(setup: MicrobatchSetup, trains: bool) -> HeadBytes:
    """Of a micro-batch in which every token has a label. `trains`: whether the head's weight has a gradient."""
    spec, tokens, width = setup.spec, setup.tokens, setup.width
    hidden = tokens * spec.hidden_size * width
    if spec.scored:
        return HeadBytes(hidden, hidden)
    rows = padded_vocabulary_size(spec, setup.layout.tp) // setup.layout.tp
    copies = 1 if spec.features.logit_softcap is None else 2
    chunk = max(1, KEEP_BYTES // (4 * rows * copies))
    one = tokens <= chunk
    probabilities = 4 * rows * min(chunk, tokens) * copies
    logits = rows * min(chunk, tokens) * width  # the product before it is float32; its gradient
    weight = rows * spec.hidden_size
    if one:
        return HeadBytes(hidden + 8 * tokens + probabilities, hidden + logits + (width * weight if trains else 0))
    # the last chunk's are there while the next one's are computed
    gradient = (4 + width) * weight if trains else 0
    return HeadBytes(hidden + 8 * tokens, hidden + 2 * probabilities + 2 * logits + gradient)
