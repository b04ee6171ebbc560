"""The table of tasks: data, loss and unit of each. A new task is a row here, a loss and an entry point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from megaswift.config import SwiftConfig
from megaswift.config.preference import beta_of, cpo_alpha_of, loss_types_of
from megaswift.config.rl_defaults import kl_estimator_of, kl_in_reward_of, policy_loss_of, weighs_kl_by_ratio
from megaswift.losses.contract import Loss
from megaswift.losses.cpo import CPO
from megaswift.losses.dpo import DPO
from megaswift.losses.dpo_loss_types import DpoSettings
from megaswift.losses.kto import KTO
from megaswift.losses.orpo import ORPO
from megaswift.losses.policy import PolicyLoss
from megaswift.losses.policy_loss_types import PolicySettings as Formulas
from megaswift.losses.reward import RewardLoss
from megaswift.losses.sft import CrossEntropy
from megaswift.registry import Registry
from megaswift.trainers.rl.rollout_loop_builder import build_rollout_loop
from megaswift.trainers.rl.settings import correction_of
from megaswift.trainers.supervised_loop_builder import LoopWithRunSummary, build_supervised_loop

if TYPE_CHECKING:
    from megaswift.trainers.session import TrainingSession


@dataclass(frozen=True)
class Task:
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
    build: Callable[[TrainingSession], LoopWithRunSummary] = build_supervised_loop
    """Makes the loop of a run of this task, with its data, model and hooks."""


def _cross_entropy(cfg: SwiftConfig) -> Loss:
    return CrossEntropy(cfg.train.label_smoothing_factor)


def _dpo(cfg: SwiftConfig) -> Loss:
    p = cfg.preference
    settings = DpoSettings(beta=beta_of(cfg), label_smoothing=p.label_smoothing, discopop_tau=p.discopop_tau)
    return DPO(
        loss_types_of(cfg),
        p.loss_weights,
        settings,
        p.f_divergence_type,
        p.f_alpha_divergence_coef,
        p.ld_alpha,
        p.use_weighting,
        p.rpo_alpha,
        p.reference_free,
    )


def _kto(cfg: SwiftConfig) -> Loss:
    p = cfg.preference
    return KTO(loss_types_of(cfg)[0], beta_of(cfg), p.desirable_weight, p.undesirable_weight)


def _cpo(cfg: SwiftConfig) -> Loss:
    p = cfg.preference
    return CPO(loss_types_of(cfg)[0], beta_of(cfg), p.label_smoothing, cpo_alpha_of(cfg), p.simpo_gamma, p.alpha)


def _policy(cfg: SwiftConfig) -> Loss:
    rl = cfg.rl
    formulas = Formulas(**{f.name: getattr(rl, f.name) for f in fields(Formulas)})
    return PolicyLoss(
        loss_type=policy_loss_of(cfg),
        settings=formulas,
        importance_sampling_level=rl.importance_sampling_level,
        beta=beta_of(cfg),
        kl_in_reward=kl_in_reward_of(cfg),
        kl_estimator=kl_estimator_of(cfg),
        use_bias_correction_kl=weighs_kl_by_ratio(cfg),
        off_policy_mask_threshold=rl.off_policy_mask_threshold,
        entropy_coef=rl.entropy_coef,
        max_completion_length=rl.max_completion_length,
        temperature=rl.temperature,
        ratio_level=correction_of(cfg).level,
        loss_agg_mode=rl.loss_agg_mode,
    )


TASKS: Registry[Task] = Registry("task")
for _task in (
    Task("sft", "supervised fine-tuning", _cross_entropy, "label_weight", "rows"),
    Task("pt", "pretraining", _cross_entropy, "label_weight", "rows"),
    Task("dpo", "direct preference optimization", _dpo, "pairs", "pairs"),
    Task("kto", "Kahneman-Tversky optimization", _kto, "examples", "examples"),
    Task(
        "orpo",
        "odds-ratio preference optimization",
        lambda cfg: ORPO(beta_of(cfg), loss_types_of(cfg)[0]),
        "pairs",
        "pairs",
        prompt_labels=True,
    ),
    Task("cpo", "contrastive preference optimization", _cpo, "pairs", "pairs"),
    Task("simpo", "simple preference optimization", _cpo, "pairs", "pairs"),
    Task(
        "rm",
        "reward model",
        lambda cfg: RewardLoss(cfg.preference.center_rewards_coefficient, loss_type=loss_types_of(cfg)[0]),
        "pairs",
        "pairs",
        scored=True,
    ),
    Task("grpo", "group relative policy optimization", _policy, "completions", "completions", build=build_rollout_loop),
    Task("ppo", "proximal policy optimization", _policy, "completions", "completions", build=build_rollout_loop),
):
    TASKS.register(_task.name, _task)
