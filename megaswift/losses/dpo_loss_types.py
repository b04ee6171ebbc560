"""The loss types of DPO as functions of the log-probabilities of a pair, and the f-divergences between policy and
reference.

Owns the formulas; `losses/options/loss_table.py` lists what each loss reads and needs. Names are those of TRL's
DPOConfig. Each returns one number per pair, [p], not reduced.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megaswift.losses.preference_pairs import PairTensors


@dataclass(frozen=True)
class DpoSettings:
    """Numbers that loss types read, under the names of their options."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    discopop_tau: float = 0.05


@dataclass(frozen=True)
class PairLogprobsAndRatios:
    """What is known about the pairs of a micro-batch."""

    logps: PairTensors
    """Log-probability of the answer under the policy."""
    reference: PairTensors
    """The same under the reference."""
    ratios: PairTensors
    """logps - reference."""
    scores: PairTensors
    """f'(exp(ratios)) of the chosen f-divergence; the ratios themselves for reverse KL."""
    lengths: PairTensors
    """Tokens of the answer, at least 1."""
    settings: DpoSettings

    @property
    def margin(self) -> Tensor:
        """[p]: beta x (score of the chosen - score of the rejected answer)."""
        return self.settings.beta * self.scores.difference

    @property
    def rewards(self) -> PairTensors:
        """beta x log ratio."""
        return self.settings.beta * self.ratios


def label_smoothed_sigmoid_loss(margin: Tensor, smoothing: float) -> Tensor:
    """-log sigmoid(margin), where a share `smoothing` of the preferences is taken to be the wrong way round."""
    loss = -F.logsigmoid(margin)
    return loss if smoothing == 0 else (1 - smoothing) * loss - smoothing * F.logsigmoid(-margin)


def _sigmoid(x: PairLogprobsAndRatios) -> Tensor:
    """DPO, arXiv 2305.18290 eq. 7; with label smoothing, conservative DPO of the same authors."""
    return label_smoothed_sigmoid_loss(x.margin, x.settings.label_smoothing)


def _hinge(x: PairLogprobsAndRatios) -> Tensor:
    """SLiC-HF, arXiv 2305.10425, on the normalized likelihood of RSO."""
    return torch.relu(1 - x.margin)


def _ipo(x: PairLogprobsAndRatios) -> Tensor:
    """IPO, arXiv 2310.12036 eq. 17, scores per token as its authors' experiments have them."""
    return ((x.scores / x.lengths).difference - 1 / (2 * x.settings.beta)) ** 2


def _exo_pair(x: PairLogprobsAndRatios) -> Tensor:
    """EXO, arXiv 2402.00856 eq. 16: KL of the model's preference from the smoothed label (1 - e, e)."""
    smoothing = x.settings.label_smoothing
    assert 0 < smoothing < 1, "exo_pair needs label smoothing"
    wins = F.logsigmoid(x.margin)
    loses = F.logsigmoid(-x.margin)
    return wins.exp() * (wins - math.log1p(-smoothing)) + loses.exp() * (loses - math.log(smoothing))


def _nca_pair(x: PairLogprobsAndRatios) -> Tensor:
    """NCA, arXiv 2402.05369."""
    chosen = x.rewards.chosen
    rejected = x.rewards.rejected
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def _robust(x: PairLogprobsAndRatios) -> Tensor:
    """Robust DPO, arXiv 2403.00409 eq. 9: unbiased when a share of the labels is flipped."""
    smoothing = x.settings.label_smoothing
    return ((smoothing - 1) * F.logsigmoid(x.margin) + smoothing * F.logsigmoid(-x.margin)) / (1 - 2 * smoothing)


def _bco_pair(x: PairLogprobsAndRatios) -> Tensor:
    """BCO on pairs, arXiv 2404.04656, without its running mean."""
    return -F.logsigmoid(x.rewards.chosen) - F.logsigmoid(-x.rewards.rejected)


def _sppo_hard(x: PairLogprobsAndRatios) -> Tensor:
    """SPPO, arXiv 2405.00675 eq. 4.7 with win probabilities 1 and 0."""
    target = 0.5 / x.settings.beta
    return (x.ratios.chosen - target) ** 2 + (x.ratios.rejected + target) ** 2


def _aot(x: PairLogprobsAndRatios) -> Tensor:
    """AOT, arXiv 2406.05882: margins of policy and reference, each sorted over the micro-batch."""
    difference = x.logps.difference.sort().values - x.reference.difference.sort().values
    return label_smoothed_sigmoid_loss(x.settings.beta * difference, x.settings.label_smoothing)


def _aot_unpaired(x: PairLogprobsAndRatios) -> Tensor:
    """AOT of unpaired answers: ratios of the chosen and of the rejected, each sorted over the micro-batch."""
    difference = x.ratios.chosen.sort().values - x.ratios.rejected.sort().values
    return label_smoothed_sigmoid_loss(x.settings.beta * difference, x.settings.label_smoothing)


def _apo_zero(x: PairLogprobsAndRatios) -> Tensor:
    """APO-zero, arXiv 2408.06266 eq. 7: chosen answers up, rejected ones down."""
    return torch.sigmoid(-x.rewards.chosen) + torch.sigmoid(x.rewards.rejected)


def _apo_down(x: PairLogprobsAndRatios) -> Tensor:
    """APO-down, arXiv 2408.06266 eq. 8: both down, rejected ones further."""
    return torch.sigmoid(x.rewards.chosen) + torch.sigmoid(-x.rewards.difference)


def _discopop(x: PairLogprobsAndRatios) -> Tensor:
    """DiscoPOP, arXiv 2406.08414 eq. 5: between logistic and exponential, by the margin."""
    gate = x.margin / x.settings.discopop_tau
    # exp(-margin) x sigmoid(gate) as one exponential: apart they are infinity x 0 where the margin is far below 0.
    exponential = torch.exp(F.logsigmoid(gate) - x.margin)
    return -F.logsigmoid(x.margin) * (1 - torch.sigmoid(gate)) + exponential


def _sigmoid_norm(x: PairLogprobsAndRatios) -> Tensor:
    """DPO with scores per token (Tulu 3, arXiv 2411.15124)."""
    return -F.logsigmoid(x.settings.beta * (x.scores / x.lengths).difference)


LOSS_TYPES: dict[str, Callable[[PairLogprobsAndRatios], Tensor]] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "robust": _robust,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
    "sigmoid_norm": _sigmoid_norm,
}
"""The formulas of dpo's rows in `losses/options/loss_table.py`; `sft` has none, it is the cross-entropy of the chosen
answers' tokens."""
SFT = "sft"
ALIASES = {"aot_pair": "aot_unpaired"}
"""Names of earlier TRL versions."""


def _forward_kl(ratio: Tensor, _: float) -> Tensor:
    return -torch.expm1((-ratio).clamp(max=80.0))  # float32's exp overflows at 88


def _js_divergence(ratio: Tensor, _: float) -> Tensor:
    return math.log(2) + F.logsigmoid(ratio)


def _alpha_divergence(ratio: Tensor, alpha: float) -> Tensor:
    """(t^(alpha - 1) - 1) / (alpha - 1) of t = exp(ratio); its limit at 1 is the ratio. Exponents end where float32
    does."""
    if abs(alpha - 1) < 1e-6:
        return ratio
    return torch.expm1(((alpha - 1) * ratio).clamp(max=80.0)) / (alpha - 1)


DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": lambda ratio, _: ratio,
    "forward_kl": _forward_kl,
    "js_divergence": _js_divergence,
    "alpha_divergence": _alpha_divergence,
}
"""f' of the density ratio, from its logarithm (f-DPO, arXiv 2309.16240); the second argument is alpha."""


def divergence_scores(ratios: PairTensors, divergence: str, alpha: float) -> PairTensors:
    """Compute the scores f'(exp(ratios)) of an f-divergence."""
    f = DIVERGENCES[divergence]
    return PairTensors(f(ratios.chosen, alpha), f(ratios.rejected, alpha))
