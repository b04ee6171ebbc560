"""Defaults of reinforcement-learning options that depend on others, which `trainers/rl/options/rl.py` declares."""

from __future__ import annotations

from typing import Any

from megaswift.losses.options.estimator_table import (
    AdvantageEstimatorEntry,
    advantage_estimator_entry,
    advantage_estimator_names,
)
from megaswift.losses.options.preference import beta_of, loss_types_of
from megaswift.options.tasks import GRPO, PPO
from megaswift.rollout.options.rollout import SERVERS

DEFAULT_GENERATIONS = 8
"""Completions of a prompt in grpo."""


def generations_per_prompt_of(c: Any) -> int:
    """Completions of each prompt."""
    given: int | None = c.rl.num_generations
    if given is not None:
        return given
    return 1 if c.task in PPO else DEFAULT_GENERATIONS


def advantage_estimator_of(c: Any) -> str:
    """How rewards become advantages; with a teacher its log-probabilities take the place of rewards."""
    if c.rl.advantage_estimator is None and c.task in GRPO and c.distillation.teacher_model is not None:
        return "teacher_kl"
    return c.rl.advantage_estimator or advantage_estimator_names("ppo" if c.task in PPO else "grpo")[0]


def advantage_estimator_entry_of(c: Any) -> AdvantageEstimatorEntry:
    """The row of the run's estimator."""
    return advantage_estimator_entry(advantage_estimator_of(c))


def policy_loss_of(c: Any) -> str:
    """The policy's loss type; unset it is that of the estimator's paper. PPO's is a mean over the tokens of the global
    batch."""
    if c.task not in GRPO:
        return "bnpo"
    default = advantage_estimator_entry_of(c).loss_type
    return default if default and not c.preference.loss_type else loss_types_of(c)[0]


def kl_in_reward_of(c: Any) -> bool:
    """Whether the divergence from the reference is taken off the rewards (and is then no term of the loss)."""
    given: bool | None = c.rl.kl_in_reward
    return beta_of(c) > 0 and (advantage_estimator_entry_of(c).kl_in_reward if given is None else given)


def kl_estimator_of(c: Any) -> str:
    """The estimate of the divergence, in the rewards or in the loss."""
    return c.rl.kl_estimator or ("k1" if kl_in_reward_of(c) else "k3")


def whitens_advantages(c: Any) -> bool:
    """Whether advantages are whitened over the batch, of estimators without a scale of their own."""
    given: bool | None = c.rl.whiten_advantages
    return advantage_estimator_entry_of(c).whitens if given is None else given


def corrects_sampler_mismatch(c: Any) -> bool:
    """Whether samples are weighed by how the trainer's probabilities differ from the sampler's: another program's, or
    those of the weights before the last update."""
    given: bool | None = c.rl.importance_sampling_correction
    if given is not None or c.rl.use_rollout_logprobs:
        return bool(given)
    return c.rollout.rollout_backend != "transformers" or samples_ahead(c)


def samples_ahead(c: Any) -> bool:
    """Whether completions may be sampled before the steps of earlier generations are taken."""
    return bool(c.rollout.async_generation or c.rollout.max_staleness)


def max_staleness_of(c: Any, steps: int) -> int:
    """Optimizer steps by which the sampler's weights may be behind; `steps`: those on a generation."""
    return steps if c.rollout.async_generation else c.rollout.max_staleness


def interrupts_completions(c: Any, steps: int, images: bool = False) -> bool:
    """Whether new weights are sent within completions.

    Args:
        c: The configuration.
        steps: Optimizer steps on a generation. With a larger `max_staleness`, completions may be under way when
            weights are sent.
        images: Whether prompts may have images.
    """
    given: bool | None = c.rollout.partial_rollouts
    possible = c.rollout.environment is None and not images
    return possible and max_staleness_of(c, steps) > steps if given is None else given


def writes_draws_side_by_side(c: Any) -> bool:
    """Whether the sampler works on several draws at the same time. A sampler in the process has room for one, and the
    conversations of a draw are led in one thread."""
    apart = c.rollout.rollout_backend in SERVERS or c.placement.sampler_engines
    return bool(apart) and c.rollout.environment is None


def weighs_kl_by_ratio(c: Any) -> bool:
    """Whether the divergence in the loss is weighed by the ratio. With it, k1 and k3 have the gradient of the KL
    itself; k2 has it without."""
    given: bool | None = c.rl.use_bias_correction_kl
    return kl_estimator_of(c) != "k2" if given is None else given


def biasing_sampling_options(c: Any) -> tuple[str, ...]:
    """Options that make the sampler draw from another distribution than the one that the loss differentiates."""
    options = c.rollout
    filters = {
        "top_p": options.top_p < 1,
        "top_k": options.top_k > 0,
        "min_p": bool(options.min_p),
        "repetition_penalty": options.repetition_penalty != 1,
    }
    return tuple(name for name, used in filters.items() if used)
