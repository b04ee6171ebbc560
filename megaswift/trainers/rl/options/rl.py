"""Section `rl`: reinforcement learning: generation, rewards, advantages, and the losses of policy and critic.

The names are TRL's, ms-swift's where they differ are spellings. The pull towards the reference (`beta`, `ref_model`,
...) and `loss_type` are in `preference`, the arithmetic of generations in `generation_batch.py`, what an unset
option means in `derived.py`, the rules in `checks/rl.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.losses.options.estimator_table import ESTIMATOR_NAMES, advantage_estimator_names
from megaswift.losses.options.loss_table import AGG_MODES
from megaswift.options.option import but_not, option
from megaswift.options.tasks import GRPO, PPO, RL

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_truncate", "geometric_mask")
"""Weights of samples: of a token, of a completion as the product of its tokens' (TRL's meaning), as their geometric
mean. What ms-swift's names say is put in these terms by `compat/swift_rollout.py` before it is read here."""


@dataclass(frozen=True)
class RlConfig:
    """Reinforcement learning"""

    num_generations: int | None = option(
        None, "Completions per prompt; default: 8, ppo 1", minimum=1, tasks=RL, metavar="N", common=RL
    )
    generation_batch_size: int | None = option(
        None,
        "Completions per generation over all ranks; default: global_batch_size",
        minimum=1,
        unit="completions",
        tasks=RL,
    )
    steps_per_generation: int | None = option(
        None,
        "Micro-batches per rank per generation, instead of generation_batch_size",
        minimum=1,
        unit="micro-batches",
        tasks=RL,
    )
    num_iterations: int = option(
        1, "Training passes over each generation", aliases=("num_ppo_epochs",), minimum=1, unit="passes", tasks=RL
    )
    dynamic_sample: bool = option(
        False, "Resample prompt groups whose rewards are all equal (DAPO, arXiv:2503.14476)", tasks=GRPO
    )
    max_resample_times: int = option(
        3,
        "Maximum number of resampling rounds of dynamic_sample",
        minimum=1,
        unit="rounds",
        tasks=GRPO,
        only_with={"dynamic_sample": True},
    )

    advantage_estimator: str | None = option(
        None,
        "Advantage estimator; default: grpo, with a teacher teacher_kl (ppo: gae)",
        choices=advantage_estimator_names(),
        choices_of=ESTIMATOR_NAMES,
        tasks=RL,
        metavar="NAME",
        common=GRPO,
    )
    pass_at_k: int = option(
        4,
        "The k of pass@k; a reward above 0 is a pass",
        minimum=1,
        unit="completions",
        tasks=GRPO,
        only_with={"advantage_estimator": "pass_at_k"},
        neutral=(None,),
    )
    scale_rewards: str = option(
        "group",
        "Divide advantages by the standard deviation of rewards in the group or batch",
        choices=("group", "batch", "none"),
        spellings={"true": "group", "false": "none"},
        tasks=GRPO,
        only_with={"advantage_estimator": "grpo", "multi_objective_aggregation": but_not("normalize_then_sum")},
    )
    multi_objective_aggregation: str = option(
        "sum_then_normalize",
        "Order of summing and normalizing several rewards (GDPO, arXiv:2601.05242)",
        choices=("sum_then_normalize", "normalize_then_sum"),
        tasks=GRPO,
        only_with={"advantage_estimator": "grpo"},
        neutral=("sum_then_normalize",),
    )
    kl_in_reward: bool | None = option(
        None,
        "Apply the KL penalty to rewards instead of the loss; default: not for grpo",
        tasks=RL,
        only_with={"beta": but_not(0)},
    )
    kl_estimator: str | None = option(
        None,
        "KL estimator; default: k3 in the loss, k1 in rewards",
        choices=("k1", "k2", "k3"),
        tasks=RL,
        metavar="NAME",
        only_with={"beta": but_not(0)},
    )
    kl_controller: str = option(
        "fixed",
        "Fixed or adaptive KL coefficient (arXiv:1909.08593)",
        choices=("fixed", "adaptive"),
        tasks=RL,
        only_with={"kl_in_reward": True},
        neutral=("fixed",),
    )
    target_kl: float = option(
        6.0,
        "Target KL per completion of the adaptive controller",
        above=0,
        unit="nats",
        tasks=RL,
        only_with={"kl_controller": "adaptive"},
    )
    kl_horizon: int = option(
        10000,
        "Horizon of the adaptive controller",
        minimum=1,
        unit="completions",
        tasks=RL,
        only_with={"kl_controller": "adaptive"},
    )

    epsilon: float = option(
        0.2,
        "Clip range of the probability ratio",
        aliases=("cliprange", "epsilon_low"),
        minimum=0,
        tasks=RL,
        only_with={"loss_type": ("dapo", "grpo", "bnpo", "dr_grpo", "luspo", "rloo", "clip_cov")},
        neutral=(None,),
        common=GRPO,
    )
    epsilon_high: float | None = option(
        None,
        "Upper clip range; default: epsilon (cispo: maximum ratio, default 5)",
        minimum=0,
        tasks=RL,
        metavar="X",
        only_with={"loss_type": ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "luspo", "rloo", "clip_cov")},
        neutral=(None,),
    )
    delta: float | None = option(
        None,
        "Upper bound of the ratio for negative advantages (arXiv:2505.07291)",
        above=1,
        tasks=RL,
        metavar="X",
        only_with={"loss_type": ("dapo", "grpo", "bnpo", "dr_grpo", "luspo", "rloo", "clip_cov")},
    )
    importance_sampling_level: str = option(
        "token",
        "Level of the ratio: token, sequence (GSPO, arXiv:2507.18071) or GSPO-token",
        choices=("token", "sequence", "sequence_token"),
        tasks=GRPO,
        only_with={"loss_type": but_not("rloo")},
        neutral=(),
    )
    mask_truncated_completions: bool = option(
        False, "Exclude truncated completions from the loss", aliases=("overlong_filter",), tasks=RL
    )
    top_entropy_quantile: float = option(
        1.0,
        "Train on the fraction of tokens with the highest entropy (arXiv:2506.01939)",
        minimum=0,
        maximum=1,
        tasks=RL,
    )
    entropy_coef: float = option(0.0, "Coefficient of the entropy bonus", minimum=0, tasks=RL)
    off_policy_mask_threshold: float | None = option(
        None,
        "Mask completions of negative advantage above this KL (arXiv:2512.02556)",
        aliases=("off_policy_sequence_mask_delta",),
        above=0,
        tasks=RL,
        metavar="X",
    )
    use_bias_correction_kl: bool | None = option(
        None,
        "Weight the KL by the importance ratio (arXiv:2512.02556); default: not for k2",
        tasks=RL,
        only_with={"beta": but_not(0), "kl_in_reward": False},
        neutral=(False,),
    )
    loss_agg_mode: str | None = option(
        None,
        "Loss normalization, under verl's names; default: that of loss_type",
        choices=AGG_MODES,
        tasks=RL,
        metavar="MODE",
    )
    use_rollout_logprobs: bool = option(
        False,
        "Use the sampler's log-probabilities as the old policy's",
        aliases=("bypass_mode",),
        tasks=RL,
    )
    clip_cov_ratio: float = option(
        0.0002,
        "Fraction of the tokens to exclude from the loss",
        above=0,
        maximum=1,
        tasks=GRPO,
        only_with={"loss_type": "clip_cov"},
        neutral=(None,),
    )
    clip_cov_lb: float = option(
        1.0,
        "Lower bound of the covariance of those tokens",
        tasks=GRPO,
        only_with={"loss_type": "clip_cov"},
        neutral=(None,),
    )
    clip_cov_ub: float = option(
        5.0,
        "Upper bound of the covariance of those tokens",
        tasks=GRPO,
        only_with={"loss_type": "clip_cov"},
        neutral=(None,),
    )
    kl_cov_ratio: float = option(
        0.0002,
        "Fraction of tokens, those with the largest covariance, that get a KL penalty",
        above=0,
        maximum=1,
        tasks=GRPO,
        only_with={"loss_type": "kl_cov"},
        neutral=(None,),
    )
    kl_cov_coef: float = option(
        1.0,
        "Weight of that KL penalty",
        aliases=("ppo_kl_coef",),
        minimum=0,
        tasks=GRPO,
        only_with={"loss_type": "kl_cov"},
        neutral=(None,),
    )
    sapo_temperature_pos: float = option(
        1.0, "Temperature for positive advantages", above=0, tasks=GRPO, only_with={"loss_type": "sapo"}
    )
    sapo_temperature_neg: float = option(
        1.05, "Temperature for other advantages", above=0, tasks=GRPO, only_with={"loss_type": "sapo"}
    )
    vespo_k_pos: float = option(
        2.0,
        "Exponent for positive advantages",
        minimum=0,
        tasks=GRPO,
        only_with={"loss_type": "vespo"},
        neutral=(None,),
    )
    vespo_lambda_pos: float = option(
        3.0, "Decay for positive advantages", minimum=0, tasks=GRPO, only_with={"loss_type": "vespo"}, neutral=(None,)
    )
    vespo_k_neg: float = option(
        3.0, "Exponent for other advantages", minimum=0, tasks=GRPO, only_with={"loss_type": "vespo"}, neutral=(None,)
    )
    vespo_lambda_neg: float = option(
        2.0, "Decay for other advantages", minimum=0, tasks=GRPO, only_with={"loss_type": "vespo"}, neutral=(None,)
    )
    importance_sampling_correction: bool | None = option(
        None,
        "Correct trainer-sampler mismatch; default: not for transformers unless async",
        aliases=("vllm_importance_sampling_correction",),
        tasks=RL,
    )
    importance_sampling_mode: str = option(
        "token_truncate",
        "Level of the correction weights; truncate or mask weights out of bounds",
        aliases=("vllm_importance_sampling_mode", "rollout_importance_sampling_mode"),
        choices=MODES,
        tasks=RL,
        only_with={"importance_sampling_correction": True},
        neutral=(None,),
    )
    importance_sampling_clip_max: float | None = option(
        3.0,
        "Upper bound of the correction weights; none: no bound",
        aliases=(
            "vllm_importance_sampling_clip_max",
            "vllm_importance_sampling_cap",
            "rollout_importance_sampling_threshold",
        ),
        above=0,
        tasks=RL,
        only_with={"importance_sampling_correction": True},
        neutral=(None,),
    )
    importance_sampling_clip_min: float | None = option(
        None,
        "Lower bound of the correction weights; default: no bound",
        aliases=("vllm_importance_sampling_clip_min",),
        minimum=0,
        tasks=RL,
        metavar="X",
        only_with={"importance_sampling_correction": True},
        neutral=(None,),
    )
    importance_sampling_filter_max: float | None = option(
        None,
        "Drop completions whose geometric mean weight is larger; default: no bound",
        above=0,
        tasks=RL,
        metavar="X",
        only_with={"importance_sampling_correction": True},
        neutral=(None,),
    )
    importance_sampling_filter_min: float | None = option(
        None,
        "Drop completions whose geometric mean weight is smaller; default: no bound",
        minimum=0,
        tasks=RL,
        metavar="X",
        only_with={"importance_sampling_correction": True},
        neutral=(None,),
    )
    gamma: float = option(
        1.0,
        "Discount factor per token",
        above=0,
        maximum=1,
        tasks=RL,
        only_with={"advantage_estimator": ("reinforce_plus_plus", "gae")},
        neutral=(1.0,),
    )
    lam: float = option(
        0.95, "Lambda of GAE (arXiv:1506.02438)", aliases=("gae_lambda",), minimum=0, maximum=1, tasks=PPO
    )
    whiten_rewards: bool = option(False, "Scale the rewards of a batch to unit standard deviation", tasks=PPO)
    whiten_advantages: bool | None = option(
        None,
        "Normalize batch advantages to mean 0 and variance 1; default: only for gae",
        aliases=("normalize_advantages",),
        tasks=RL,
        only_with={"advantage_estimator": ("rloo", "gae")},
    )

    log_completions: bool = option(True, "Write completions and rewards to completions.jsonl and the report", tasks=RL)
    num_completions_to_print: int | None = option(
        None,
        "Number of completions per logged step; default: all",
        minimum=1,
        unit="completions",
        tasks=RL,
        only_with={"log_completions": True},
    )
    num_completions_with_tokens: int = option(
        8,
        "Completions per step logged token by token: 20 bytes per token; 0: none",
        minimum=0,
        unit="completions",
        tasks=RL,
        only_with={"log_completions": True},
    )
