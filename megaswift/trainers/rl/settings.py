"""The settings of reinforcement learning with all defaults resolved."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.losses.options.estimator_table import advantage_estimator_entry
from megaswift.losses.options.loss_table import COVARIANCES, losses_needing
from megaswift.losses.sampler_correction import SamplerCorrection
from megaswift.trainers.rl.options.rl import RlConfig


@dataclass(frozen=True)
class RlSettings:
    """Sizes and switches of a run, the same on every rank."""

    seed: int
    group: int
    """Completions of a prompt."""
    generation: int
    """Completions of a generation."""
    slices: int
    """Optimizer steps of one pass over a generation."""
    iterations: int
    """Passes over a generation."""
    temperature: float
    beta: float
    estimator: str
    kl_in_reward: bool
    kl_estimator: str = "k1"
    whitens: bool = False
    """Bring advantages of gae and rloo to mean 0 and deviation 1."""
    mask_truncated: bool = False
    corrects: bool = False
    """Weigh samples against the sampler's mismatch."""
    tries: int = 1
    """How many times a generation is sampled, at most, until every group has a spread."""
    top_entropy_quantile: float = 1.0
    use_rollout_logprobs: bool = False
    """The sampler's log-probabilities are those of the old policy."""
    loss_type: str = "dapo"
    reward_weights: tuple[float, ...] = ()
    """By reward function; empty: all 1."""
    each_reward: bool = False
    """Rewards are normalized one by one (GDPO), so that a group has a spread where any of them has."""
    max_staleness: int = 0
    """Optimizer steps by which the weights that sample may be older than those that are trained; 0: not older."""

    @property
    def draws(self) -> int:
        """Completions drawn for a prompt: its group, and for a greedy baseline the greedy one as the last."""
        return self.group + advantage_estimator_entry(self.estimator).greedy_baseline

    @property
    def batch(self) -> int:
        """Completions of an optimizer step."""
        return self.generation // self.slices

    @property
    def steps(self) -> int:
        """Optimizer steps on a generation."""
        return self.slices * self.iterations

    @property
    def needs_old(self) -> bool:
        """Whether the policy's log-probabilities before the first step must be known apart from the step's own."""
        asks = advantage_estimator_entry(self.estimator).teacher
        return self.steps > 1 or self.corrects or self.kl_in_reward or self.use_rollout_logprobs or asks

    @property
    def needs_covariances(self) -> bool:
        """Whether the loss treats tokens of high covariance apart."""
        return self.loss_type in losses_needing("grpo", COVARIANCES)

    @property
    def forward_passes(self) -> float:
        """Forward passes of the policy's model besides those of a step: for old and reference log-probabilities once a
        generation, for entropies and covariances before each step."""
        scored_old = self.needs_old and not self.use_rollout_logprobs
        each_step = (self.top_entropy_quantile < 1.0) + self.needs_covariances
        return (scored_old + (self.beta != 0)) / self.iterations + each_step


def correction_of(rl: RlConfig) -> SamplerCorrection:
    """Return the correction of samples for the probabilities with which the sampler drew them."""
    return SamplerCorrection(
        rl.importance_sampling_mode,
        rl.importance_sampling_clip_max,
        rl.importance_sampling_clip_min,
        rl.importance_sampling_filter_max,
        rl.importance_sampling_filter_min,
    )
