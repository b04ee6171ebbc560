"""Section `preference`: losses on preference pairs and labeled completions, and the reference model. The formulas
are in `megaswift.losses`.

Reinforcement learning has its own section, `rl`; it shares the reference, `beta` and `loss_type`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megaswift.losses.options.loss_table import ALPHAPO, loss_names
from megaswift.options.option import but_not, option
from megaswift.options.tasks import RETRIEVAL, RL, SAMPLED

LOSSES = {task: loss_names(task) for task in ("dpo", "kto", "orpo", "cpo", "rm", "grpo", *RETRIEVAL)}
"""The values of `loss_type` by task, the default first."""
BETAS = {"simpo": 2.0, "gkd": 0.5, "grpo": 0.0, "ppo": 0.05}
"""Where the default is not 0.1."""
DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
ALL_LOSSES = tuple(dict.fromkeys(name for names in LOSSES.values() for name in names))
_REFERENCED = ("dpo", "kto", *RL)


@dataclass(frozen=True)
class PreferenceConfig:
    """Preference learning"""

    beta: float | None = option(
        None,
        "KL (orpo: odds-ratio) coefficient; gkd: KL to use, 0 forward, 1 reverse",
        aliases=("kl_coef",),
        minimum=0,
        tasks=("dpo", "kto", "orpo", "cpo", "simpo", *SAMPLED),
        common=("dpo", "kto", "orpo", "cpo", "simpo", *RL),
    )
    loss_type: tuple[str, ...] = option(
        (),
        "Loss types, summed; default: the first of the task",
        choices=ALL_LOSSES,
        choices_of=LOSSES,
        spellings={"aot_pair": "aot_unpaired"},
        tasks=tuple(LOSSES),
        metavar="NAME...",
        common=tuple(LOSSES),
    )
    loss_weights: tuple[float, ...] = option(
        (), "Weight of each loss_type; default: 1 each", tasks=("dpo",), metavar="NUMBER..."
    )
    label_smoothing: float = option(
        0.0,
        "Probability that a preference label is wrong",
        minimum=0,
        below=1,
        tasks=("dpo", "cpo", "simpo"),
        only_with={"loss_type": ("sigmoid", "exo_pair", "robust", "aot", "aot_unpaired", "simpo", "alphapo")},
        neutral=(0.0,),
    )
    f_divergence_type: str = option(
        "reverse_kl",
        "Divergence from the reference model (f-DPO, arXiv:2309.16240)",
        choices=DIVERGENCES,
        tasks=("dpo",),
        only_with={"loss_type": ("sigmoid", "hinge", "ipo", "exo_pair", "robust", "discopop", "sigmoid_norm")},
        neutral=("reverse_kl",),
    )
    f_alpha_divergence_coef: float = option(
        0.5,
        "Alpha of alpha_divergence",
        aliases=("f_alpha_coef",),
        tasks=("dpo",),
        only_with={"f_divergence_type": "alpha_divergence"},
    )
    ld_alpha: float | None = option(
        None,
        "Weight of tokens beyond the shorter completion (LD-DPO, arXiv:2409.06411)",
        minimum=0,
        maximum=1,
        tasks=("dpo",),
    )
    use_weighting: bool = option(
        False, "Weight pairs by their probability under the policy (WPO, arXiv:2406.11827)", tasks=("dpo",)
    )
    rpo_alpha: float | None = option(
        None,
        "Weight of an added NLL term on the chosen completion (RPO, arXiv:2404.19733)",
        above=0,
        unset=("0", "0.0"),
        tasks=("dpo",),
    )
    discopop_tau: float = option(
        0.05, "Temperature of discopop", above=0, tasks=("dpo",), only_with={"loss_type": "discopop"}
    )
    reference_free: bool = option(False, "Set all reference log-probabilities to 0", tasks=("dpo",))
    ref_model: str | None = option(
        None,
        "Reference model folder; default: the initial model",
        aliases=("ref_model_name_or_path",),
        tasks=_REFERENCED,
        metavar="DIR",
        only_with={"reference_free": False, "beta": but_not(0)},
        common=("dpo", "kto"),
    )
    offload_reference: bool = option(
        False,
        "Offload reference weights to CPU memory when idle",
        tasks=_REFERENCED,
        only_with={"reference_free": False, "beta": but_not(0), "precompute_ref_log_probs": False},
    )
    precompute_ref_log_probs: bool = option(
        False,
        "Precompute reference log-probabilities, then free the reference model",
        tasks=("dpo", "kto"),
        only_with={"reference_free": False},
    )
    sync_ref_model: bool = option(
        False,
        "Update the reference model towards the policy (TR-DPO, arXiv:2404.09656)",
        tasks=_REFERENCED,
        only_with={"reference_free": False, "beta": but_not(0)},
    )
    ref_model_mixup_alpha: float = option(
        0.6,
        "Share of the policy in each reference update",
        above=0,
        maximum=1,
        tasks=_REFERENCED,
        only_with={"sync_ref_model": True},
    )
    ref_model_sync_steps: int = option(
        512,
        "Steps between reference updates",
        minimum=1,
        unit="steps",
        tasks=_REFERENCED,
        only_with={"sync_ref_model": True},
    )
    desirable_weight: float = option(1.0, "Loss weight of desirable completions", minimum=0, tasks=("kto",))
    undesirable_weight: float = option(1.0, "Loss weight of undesirable completions", minimum=0, tasks=("kto",))
    cpo_alpha: float | None = option(
        None,
        "Weight of the NLL term on the chosen completion; default: 1, simpo 0",
        minimum=0,
        tasks=("cpo", "simpo"),
        only_with={"loss_type": but_not(ALPHAPO)},
        common=("cpo",),
    )
    simpo_gamma: float = option(
        1.0,
        "Target reward margin of SimPO",
        minimum=0,
        tasks=("cpo", "simpo"),
        only_with={"loss_type": ("simpo", "alphapo")},
        common=("simpo",),
    )
    alpha: float = option(
        0.0, "Exponent of the AlphaPO reward; 0: log-probability (arXiv:2501.03884)", tasks=("cpo", "simpo")
    )
    center_rewards_coefficient: float | None = option(
        None,
        "Weight of the penalty that centers rewards on zero (arXiv:2312.09244)",
        above=0,
        tasks=("rm",),
        common=("rm",),
    )


def beta_of(c: Any) -> float:
    """Return `beta`, or the default of the task."""
    given: float | None = c.preference.beta
    return given if given is not None else BETAS.get(c.task, 0.1)


def loss_types_of(c: Any) -> tuple[str, ...]:
    """Return `loss_type`, or the first of the task."""
    if c.task == "simpo" or c.preference.loss_type == (ALPHAPO,):
        return ("simpo",)
    return c.preference.loss_type or LOSSES.get(c.task, ())[:1]


def cpo_alpha_of(c: Any) -> float:
    """Return `cpo_alpha`, or the default of the task."""
    given = c.preference.cpo_alpha
    return float(c.task == "cpo" and c.preference.loss_type != (ALPHAPO,)) if given is None else given


def needs_reference(c: Any) -> bool:
    """Return whether the loss, or the rewards, compare with a reference."""
    return c.task in _REFERENCED and not c.preference.reference_free and beta_of(c) > 0
