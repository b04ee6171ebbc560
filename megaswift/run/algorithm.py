"""The row `algorithm` of the first screen: the loss, how rewards become advantages, and their coefficients.

The names are those of the options, so that a value can be typed as it is shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megaswift.config import SwiftConfig
from megaswift.config.rules import ignored_option_names
from megaswift.config.sections import OPTIONS
from megaswift.losses.options.loss_table import PLUGIN_LOSSES, loss_entries
from megaswift.losses.options.preference import beta_of, cpo_alpha_of, loss_types_of
from megaswift.losses.policy_loss_types import CISPO_CAP
from megaswift.options.option import Option
from megaswift.options.tasks import CLASSIFIERS, DISTILLATION, LANGUAGE, RL
from megaswift.options.values import option_value_text
from megaswift.trainers.rl.options.derived import (
    advantage_estimator_of,
    kl_estimator_of,
    kl_in_reward_of,
    policy_loss_of,
    whitens_advantages,
)

SECTIONS = ("preference", "retrieval", "rl", "critic")
"""Sections whose options describe an algorithm."""
NOT_COEFFICIENTS = frozenset(
    {
        *("num_generations", "generation_batch_size", "steps_per_generation", "num_completions_to_print"),
        *("log_completions", "ref_model", "offload_reference", "precompute_ref_log_probs", "sync_ref_model"),
        *("ref_model_mixup_alpha", "ref_model_sync_steps", "critic_model", "critic_learning_rate"),
    }
)
"""Options of these sections that other rows show."""
NAMED = frozenset(
    {
        *("loss_type", "advantage_estimator", "beta", "loss_agg_mode", "kl_in_reward", "kl_estimator"),
        *("loss_weights", "cpo_alpha", "whiten_advantages", "epsilon", "epsilon_high"),
    }
)
"""Options that `_names` and `_clip_range` show."""


def algorithm_text(cfg: SwiftConfig) -> str:
    """Describe the algorithm of a run; empty for cross-entropy alone."""
    idle = ignored_option_names(cfg)
    parts = [*_names(cfg), *_clip_range(cfg, idle)]
    for option in OPTIONS.values():
        if option.section not in SECTIONS or option.name in NAMED | NOT_COEFFICIENTS | idle:
            continue
        value = cfg.value(option.name)
        if value != option.default or (_is_read_by_few(cfg, option) and value not in option.neutral):
            parts.append(_named(option.name, value))
    return ", ".join(parts)


def _names(cfg: SwiftConfig) -> Iterator[str]:
    """Yield what is chosen by name, and the coefficients whose default depends on the task."""
    if cfg.task in LANGUAGE:
        yield from _cross_entropy(cfg)
        return
    if cfg.task in CLASSIFIERS:
        if cfg.data.problem_type:
            yield _named("problem_type", cfg.data.problem_type)
        return
    if cfg.task in DISTILLATION:
        beta = beta_of(cfg)
        known = {0.0: "KL(teacher | model)", 1.0: "KL(model | teacher)"}
        yield f"beta {beta:g} ({known.get(beta, 'generalized Jensen-Shannon divergence')})"
        yield _named("temperature", cfg.rollout.temperature)
        own = cfg.distillation.lmbda
        rest = "the teacher's" if cfg.distillation.seq_kd else "the rows'"
        shares = {0.0: f"all steps on {rest}", 1.0: "all steps on the model's completions"}
        mixed = f"{own:.0%} of steps on the model's completions, others on {rest}"
        yield f"lmbda {own:g} ({shares.get(own, mixed)})"
        if cfg.distillation.gkd_logits_topk:
            yield _named("gkd_logits_topk", cfg.distillation.gkd_logits_topk)
        if cfg.distillation.sft_alpha:
            yield _named("sft_alpha", cfg.distillation.sft_alpha)
        return
    if cfg.task in RL:
        yield _named("advantage_estimator", advantage_estimator_of(cfg))
        if whitens_advantages(cfg):
            yield _named("whiten_advantages", True)
        yield _named("loss_type", policy_loss_of(cfg))
        mode = cfg.rl.loss_agg_mode or loss_entries(cfg.task, (policy_loss_of(cfg),))[0].loss_agg_mode
        yield _named("loss_agg_mode", mode)
        yield from _kl(cfg)
        return
    names = cfg.preference.loss_type or loss_types_of(cfg)
    weights = cfg.preference.loss_weights or (1.0,) * len(names)
    summed = " + ".join(f"{weight:g} x {name}" for weight, name in zip(weights, names, strict=True))
    yield f"loss_type {names[0] if len(names) == 1 else summed}"
    if OPTIONS["beta"].belongs_to(cfg.task):
        yield _named("beta", beta_of(cfg))
    if OPTIONS["cpo_alpha"].belongs_to(cfg.task):
        yield _named("cpo_alpha", cpo_alpha_of(cfg))


def _cross_entropy(cfg: SwiftConfig) -> Iterator[str]:
    smoothing = cfg.train.label_smoothing_factor
    layers = cfg.model.mtp_num_layers
    if smoothing or layers or cfg.train.enable_dft_loss:
        yield "cross-entropy"
    if cfg.train.enable_dft_loss:
        yield "times each token's probability"
    if smoothing:
        yield _named("label_smoothing_factor", smoothing)
    if layers:
        yield _named("mtp_num_layers", layers)
        yield _named("mtp_loss_scaling_factor", cfg.model.mtp_loss_scaling_factor)


def _kl(cfg: SwiftConfig) -> Iterator[str]:
    beta = beta_of(cfg)
    where = "subtracted from the rewards" if kl_in_reward_of(cfg) else "in the loss"
    yield f"beta {beta:g} ({f'KL {kl_estimator_of(cfg)} {where}' if beta else 'no KL penalty'})"


def _clip_range(cfg: SwiftConfig, idle: set[str]) -> Iterator[str]:
    """Yield the bounds of the probability ratio; cispo has an upper one alone. Nobody knows what a loss of the user's
    does with them: what was given is shown, without a claim."""
    low = cfg.rl.epsilon
    high = cfg.rl.epsilon_high
    if cfg.task in RL and (cfg.task, policy_loss_of(cfg)) in PLUGIN_LOSSES:
        yield from (_named(name, cfg.value(name)) for name in ("epsilon", "epsilon_high") if name in cfg.given)
        return
    if "epsilon" not in idle:
        both = _named("epsilon", low) + ("" if high is None else f", {_named('epsilon_high', high)}")
        yield f"{both} (ratios clipped to {1 - low:g} - {1 + (low if high is None else high):g})"
    elif "epsilon_high" not in idle:
        yield f"epsilon_high {CISPO_CAP if high is None else high:g} (largest ratio)"


def _is_read_by_few(cfg: SwiftConfig, option: Option) -> bool:
    """Return whether only this task reads the option, or only some losses or estimators, the chosen one among them."""
    listed = {selector: wanted.values for selector, wanted in option.only_with.items() if wanted.values}
    if not listed.keys() & {"loss_type", "advantage_estimator"}:
        return len(option.details.get("tasks", ())) == 1
    chosen: dict[str, tuple[Any, ...]] = {"loss_type": cfg.preference.loss_type or loss_types_of(cfg)}
    if cfg.task in RL:
        chosen = {"loss_type": (policy_loss_of(cfg),), "advantage_estimator": (advantage_estimator_of(cfg),)}
    return any(name in listed.get(selector, ()) for selector, names in chosen.items() for name in names)


def _named(name: str, value: Any) -> str:
    return f"{name} {option_value_text(value)}"
