"""The table of tasks: data, loss and unit of each. A new task is a row here, a loss and an entry point."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megaswift.base.registry import Registry
from megaswift.config import SwiftConfig
from megaswift.losses.classification import SequenceClassification, TokenClassification
from megaswift.losses.contract import Loss
from megaswift.losses.cpo import CPO
from megaswift.losses.dpo import DPO
from megaswift.losses.dpo_loss_types import DpoSettings
from megaswift.losses.gkd import Distillation
from megaswift.losses.kto import KTO
from megaswift.losses.mtp import MultiTokenPrediction
from megaswift.losses.options.classification import default_problem_type
from megaswift.losses.options.preference import PreferenceConfig, beta_of, cpo_alpha_of, loss_types_of
from megaswift.losses.orpo import ORPO
from megaswift.losses.policy import PolicyLoss
from megaswift.losses.policy_loss_types import PolicySettings
from megaswift.losses.reward import RewardLoss
from megaswift.losses.sft import CrossEntropy
from megaswift.run.dataset_task import DatasetTask
from megaswift.run.distillation_task import DistillationTask
from megaswift.run.policy_task import PolicyTask
from megaswift.run.retrieval.task import RetrievalTask, embedding_loss, reranker_loss
from megaswift.run.task import Task
from megaswift.trainers.rl.options.derived import (
    corrects_sampler_mismatch,
    kl_estimator_of,
    kl_in_reward_of,
    policy_loss_of,
    weighs_kl_by_ratio,
)
from megaswift.trainers.rl.options.rl import RlConfig
from megaswift.trainers.rl.settings import correction_of


def _options_of(settings: type[DpoSettings | PolicySettings], section: PreferenceConfig | RlConfig) -> dict[str, Any]:
    """Return the options of a section that formulas read: the fields of their settings have the options' names."""
    return {field.name: getattr(section, field.name) for field in fields(settings)}


def _cross_entropy(cfg: SwiftConfig) -> Loss:
    loss = CrossEntropy(cfg.train.label_smoothing_factor, cfg.train.enable_dft_loss)
    layers = cfg.model.mtp_num_layers
    return MultiTokenPrediction(loss, layers, cfg.model.mtp_loss_scaling_factor) if layers else loss


def _dpo(cfg: SwiftConfig) -> Loss:
    preference = cfg.preference
    return DPO(
        loss_types=loss_types_of(cfg),
        loss_weights=preference.loss_weights,
        settings=DpoSettings(**{**_options_of(DpoSettings, preference), "beta": beta_of(cfg)}),
        f_divergence=preference.f_divergence_type,
        f_alpha=preference.f_alpha_divergence_coef,
        ld_alpha=preference.ld_alpha,
        use_weighting=preference.use_weighting,
        rpo_alpha=preference.rpo_alpha,
        reference_free=preference.reference_free,
    )


def _sequence_classification(cfg: SwiftConfig) -> Loss:
    labels = cfg.data.named_labels or 1
    return SequenceClassification(cfg.data.problem_type or default_problem_type(labels), labels)


def _kto(cfg: SwiftConfig) -> Loss:
    return KTO(
        loss_type=loss_types_of(cfg)[0],
        beta=beta_of(cfg),
        desirable_weight=cfg.preference.desirable_weight,
        undesirable_weight=cfg.preference.undesirable_weight,
    )


def _cpo(cfg: SwiftConfig) -> Loss:
    return CPO(
        loss_type=loss_types_of(cfg)[0],
        beta=beta_of(cfg),
        label_smoothing=cfg.preference.label_smoothing,
        cpo_alpha=cpo_alpha_of(cfg),
        simpo_gamma=cfg.preference.simpo_gamma,
        alpha=cfg.preference.alpha,
    )


def _policy(cfg: SwiftConfig) -> Loss:
    rl = cfg.rl
    return PolicyLoss(
        loss_type=policy_loss_of(cfg),
        settings=PolicySettings(**_options_of(PolicySettings, rl)),
        importance_sampling_level=rl.importance_sampling_level,
        beta=beta_of(cfg),
        kl_in_reward=kl_in_reward_of(cfg),
        kl_estimator=kl_estimator_of(cfg),
        use_bias_correction_kl=weighs_kl_by_ratio(cfg),
        off_policy_mask_threshold=rl.off_policy_mask_threshold,
        entropy_coef=rl.entropy_coef,
        max_completion_length=cfg.rollout.max_completion_length,
        temperature=cfg.rollout.temperature,
        ratio_level=correction_of(cfg.rl).level,
        corrects=corrects_sampler_mismatch(cfg),
        loss_agg_mode=rl.loss_agg_mode,
    )


TASKS: Registry[Task] = Registry("task")
for _task in (
    DatasetTask("sft", "supervised fine-tuning", _cross_entropy, "label_weight", "rows"),
    DatasetTask("pt", "pretraining", _cross_entropy, "label_weight", "rows"),
    DatasetTask("dpo", "direct preference optimization", _dpo, "pairs", "pairs"),
    DatasetTask("kto", "Kahneman-Tversky optimization", _kto, "examples", "examples"),
    DatasetTask(
        "orpo",
        "odds-ratio preference optimization",
        lambda cfg: ORPO(beta_of(cfg), loss_types_of(cfg)[0]),
        "pairs",
        "pairs",
        prompt_labels=True,
    ),
    DatasetTask("cpo", "contrastive preference optimization", _cpo, "pairs", "pairs"),
    DatasetTask("simpo", "simple preference optimization", _cpo, "pairs", "pairs"),
    DatasetTask(
        "rm",
        "reward model",
        lambda cfg: RewardLoss(cfg.preference.center_rewards_coefficient, loss_type=loss_types_of(cfg)[0]),
        "pairs",
        "pairs",
        scored=True,
    ),
    DistillationTask(
        "gkd",
        "distillation from a teacher",
        lambda cfg: Distillation(
            beta_of(cfg),
            cfg.rollout.temperature,
            cfg.distillation.gkd_logits_topk,
            cfg.distillation.sft_alpha,
        ),
        "label_weight",
        "rows",
    ),
    PolicyTask("grpo", "group relative policy optimization", _policy, "completions", "completions"),
    PolicyTask("ppo", "proximal policy optimization", _policy, "completions", "completions"),
    RetrievalTask("embedding", "embedding model", embedding_loss, "rows", "rows"),
    RetrievalTask("reranker", "reranker", reranker_loss, "rows", "rows", scored=True),
    RetrievalTask("generative_reranker", "generative reranker", reranker_loss, "rows", "rows"),
    DatasetTask("seq_cls", "classification of texts", _sequence_classification, "rows", "rows", scored=True),
    DatasetTask(
        "token_cls",
        "classification of tokens",
        lambda cfg: TokenClassification(cfg.data.named_labels or 1),
        "labels",
        "rows",
    ),
):
    TASKS.register(_task.name, _task)
