"""The demands of a task on a training step besides passes over its rows: documents of a row, outputs of the head,
forward passes before the step, and a copy of the weights of a reference.

Owns these facts by task, from the options alone; the losses themselves are `megaswift/losses`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.config import SwiftConfig
from megaswift.losses.options.loss_table import COVARIANCES, KL_PAIRS, RUNNING_MEAN, losses_needing
from megaswift.losses.options.preference import loss_types_of, needs_reference
from megaswift.memory.rollout_bytes import Rollout
from megaswift.options.tasks import PAIRS, RL
from megaswift.trainers.rl.options.derived import (
    advantage_estimator_entry_of,
    corrects_sampler_mismatch,
    generations_per_prompt_of,
    kl_in_reward_of,
    policy_loss_of,
)

LAST_TOKENS = ("rm", "seq_cls")
"""Tasks that score whole documents."""
DEVICE = "device"
HOST = "host"
UNITS = {**dict.fromkeys(PAIRS, "pairs"), **dict.fromkeys(RL, "completions"), "kto": "examples"}
"""Names of rows."""
FIELDS = {
    "dpo": ("logprobs", "entropy", "correct", "mean_logit"),
    "kto": ("logprobs", "entropy", "mean_logit"),
    **dict.fromkeys(RL, ("logprobs", "entropy")),
    **dict.fromkeys(("orpo", "cpo", "simpo"), ("logprobs", "mean_logit")),
}
"""Outputs of the vocabulary's head that a loss and its metrics read."""


@dataclass(frozen=True)
class Objective:
    """The loss of a run, as far as memory and time of a step depend on it."""

    unit: str = "rows"
    """What batch sizes count."""
    documents: int = 1
    """Documents of such a unit, each of up to max_length tokens."""
    fields: tuple[str, ...] = ("logprobs", "correct")
    """Outputs of the vocabulary's head."""
    last_tokens: bool = False
    """Whether the head reads the last token of each document alone."""
    forward_passes: float = 0
    """Forward passes over the rows of a step before it trains."""
    rollout: Rollout | None = None
    """How the rows of a step are sampled, in reinforcement learning."""
    critic: bool = False
    """Whether a second model trains on the same rows."""
    reference: str = ""
    """Where a copy of the weights lies for the reference: `device`, `host`, or empty where there is none."""


def objective_of(cfg: SwiftConfig) -> Objective:
    """Return the objective of a run of a task in `megaswift.options.tasks.PLANNED`."""
    fields = FIELDS.get(cfg.task, Objective.fields)
    if cfg.task == "dpo" and cfg.preference.use_weighting:
        fields = (*fields, "log_sum_sq")
    return Objective(
        UNITS.get(cfg.task, Objective.unit),
        2 if cfg.task in PAIRS else 1,
        fields,
        cfg.task in LAST_TOKENS,
        forward_passes_before_step(cfg),
        Rollout.of(cfg, generations_per_prompt_of(cfg)) if cfg.task in RL else None,
        cfg.task in RL and advantage_estimator_entry_of(cfg).critic,
        _reference(cfg),
    )


def forward_passes_before_step(cfg: SwiftConfig) -> float:
    """Count the forward passes of a step before it trains: for the reference's scores, KTO's reference point, BCO's
    running mean, a policy's log-probabilities.

    A pass over KTO's mismatched answers counts as a whole one, because they have as many tokens as the batch's own.
    """
    if cfg.task in RL:
        return _policy_passes(cfg)
    if not needs_reference(cfg):
        return 0
    loss_type = loss_types_of(cfg)[0]
    if loss_type in losses_needing("kto", KL_PAIRS):
        return 3  # the model on mismatched answers, and the reference on these and on the batch's own
    by_reference = not cfg.preference.precompute_ref_log_probs
    return by_reference + (loss_type in losses_needing("kto", RUNNING_MEAN))


def _policy_passes(cfg: SwiftConfig) -> float:
    """Return the passes of a policy's model (`RlSettings.forward_passes`): its own log-probabilities before the first
    of several steps on a generation, or apart from the sampler's, and the reference's; for entropies and covariances
    before each step."""
    rl = cfg.rl
    steps = rl.num_iterations > 1 or rl.generation_batch_size is not None or rl.steps_per_generation is not None
    apart = corrects_sampler_mismatch(cfg) or kl_in_reward_of(cfg) or advantage_estimator_entry_of(cfg).teacher
    scored = (steps or apart) and not rl.use_rollout_logprobs
    each_step = (rl.top_entropy_quantile < 1.0) + (policy_loss_of(cfg) in losses_needing("grpo", COVARIANCES))
    return (scored + needs_reference(cfg)) / rl.num_iterations + each_step


def _reference(cfg: SwiftConfig) -> str:
    """New adapters need no copy, because the base model is the reference; scores that are computed before training
    need none either."""
    preference = cfg.preference
    if not needs_reference(cfg) or preference.precompute_ref_log_probs or cfg.model.train_type != "full":
        return ""
    return HOST if preference.offload_reference else DEVICE
