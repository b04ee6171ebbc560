"""The FLOP formula of throughput metrics and plans. No torch.

FLOPs of a training step = 6 x N x tokens + 6 x attention layers x heads x head size x sum of (document length)^2 + 6 x
linear layers x value heads x 3 dk dv x tokens, with N the parameters without the input embedding (of a mixture of
experts: those active for a token). Forward counts 2 a weight and token, backward 4; the attention part is that of a
causal mask, half of the full square (PaLM, appendix B, halved); an encoder has the full square. A gated delta net's
state [dk, dv] is read at the key, written and read at the query for each token and value head, however long the
document (arXiv:2412.06464, equation 10); its chunks do more, which does not count. Recomputed activations and padding
do not count: they are work, not use. Frozen parameters have no weight gradient: N counts two thirds of them (LoRA). A
forward pass beside the step (a reference) counts 2 x N x tokens and 2 x the attention, N without that cut. Each of
several models that train on the same tokens (a critic) has a rule of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.models.encoders import is_encoder
from megaswift.models.spec import ModelSpec


@dataclass(frozen=True)
class StepFlopFormula:
    """The rule's two constants for one model."""

    parameters: int
    attention: int
    """attention layers x heads x head size."""
    passes: float = 0
    """Forward passes over the step's tokens beside forward and backward; a pass that serves several steps counts in
    parts."""
    forward: int = 0
    """Parameters that count in such a pass."""
    state: int = 0
    """linear layers x value heads x 3 x key width x value width."""

    def step(self, tokens: float, squares: float) -> float:
        """Return the FLOPs of a step over `tokens` tokens in documents whose squared lengths add up to `squares`."""
        mixed = self.attention * squares + self.state * tokens
        return 6.0 * (self.parameters * tokens + mixed) + 2.0 * self.passes * (self.forward * tokens + mixed)


def mixer_flop_sizes(spec: ModelSpec) -> tuple[int, int]:
    """Return the formula's `attention` and `state` of a model."""
    linear = spec.linear_layer_count
    state = linear * spec.linear_values * 3 * spec.linear_key_width if linear else 0
    attention = (spec.num_layers + spec.mtp_layers - linear) * spec.product_width
    return attention * (2 if is_encoder(spec.hf_config) else 1), state
