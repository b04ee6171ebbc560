"""Memory of the vocabulary head for a micro-batch: the head's own formula, with the shapes of a run."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.memory.microbatch_setup import MicrobatchSetup
from megaswift.models.weights.table import padded_vocabulary_size
from megaswift.parallel.vocabulary_head_memory import HeadShape, megatron_engine_head_peak_bytes


@dataclass(frozen=True)
class HeadBytes:
    """Bytes on a rank of the last pipeline stage."""

    kept: int
    """Between forward and backward pass."""
    working: int
    """At most beside these, within its forward or backward pass."""


def head_bytes(setup: MicrobatchSetup, trains: bool) -> HeadBytes:
    """Returns the bytes of the head for a micro-batch in which every token has a label. `trains`: whether the head's
    weight has a gradient."""
    spec = setup.spec
    tokens = setup.tokens
    width = setup.width
    hidden = tokens * spec.hidden_size * width
    if spec.scored:
        return HeadBytes(hidden, hidden)
    model = setup.options.model
    shape = HeadShape(
        rows=tokens,
        hidden_size=spec.hidden_size,
        width=padded_vocabulary_size(spec, setup.layout.tp) // setup.layout.tp,
        element_bytes=width,
        float32_products=model.fp32_lm_head,
        extra_tiles=int(spec.features.logit_softcap is not None or spec.features.logit_scale != 1.0),
        weight_trained=trains,
    )
    # the head adds to float32 main gradients only
    fused = model.gradient_accumulation_fusion is not False and setup.options.optim.main_grads_dtype == "fp32"
    device = "cuda" if setup.kernels.cuda else "cpu"
    return HeadBytes(hidden + 16 * tokens, megatron_engine_head_peak_bytes(shape, device, fused))
