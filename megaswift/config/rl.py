"""Section `rl`: reinforcement learning. What is sampled, how it is judged, and what the policy and its critic learn
from it.

The names are TRL's, ms-swift's where they differ are spellings. The pull towards the reference (`beta`, `ref_model`,
...) and `loss_type` are in `preference`, the arithmetic of generations in `rl_batch.py`, what an unset option means in
`rl_defaults.py`, the rules in `rl_rules.py` and `rl_clashes.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.config.data import GRPO, PPO, RL
from megaswift.config.estimator_table import estimator_names
from megaswift.config.loss_table import AGG_MODES
from megaswift.config.option import option

BACKENDS = ("transformers", "vllm", "vllm_server", "sglang")
SERVERS = ("vllm_server", "sglang")
"""Backends that are other programs."""
BACKEND_SPELLINGS = {
    "true": "vllm",
    "false": "transformers",
    "colocate": "vllm",
    "server": "vllm_server",
    "sglang_server": "sglang",
}
"""`use_vllm` is a switch, `vllm_mode` says where it runs."""
MODES = (
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "geometric_truncate",
    "geometric_mask",
)
"""Weights of samples: of a token, of a completion as the product of its tokens' (TRL's meaning), as their geometric
mean. What ms-swift's names say is put in these terms by `swift_correction.py` before it is read here."""


@dataclass(frozen=True)
class RlConfig:
    """Reinforcement learning"""

    num_generations: int | None = option(
        None, "Completions of each prompt; unset: 8, ppo 1", minimum=1, tasks=RL, metavar="N"
    )
    generation_batch_size: int | None = option(
        None,
        "Completions per generation, over all ranks; unset: global_batch_size",
        minimum=1,
        unit="completions",
        tasks=RL,
    )
    steps_per_generation: int | None = option(
        None,
        "The same as forward passes per rank; instead of generation_batch_size",
        minimum=1,
        unit="passes",
        tasks=RL,
    )
    num_iterations: int = option(
        1, "Passes over each generation (PPO epochs)", aliases=("num_ppo_epochs",), minimum=1, unit="times", tasks=RL
    )
    dynamic_sample: bool = option(
        False, "Resample groups whose rewards are all equal (DAPO, arXiv:2503.14476)", tasks=GRPO
    )
    max_resample_times: int = option(3, "Most resampling rounds of dynamic_sample", minimum=1, unit="times", tasks=GRPO)
    async_generation: bool = option(
        False,
        "Generate for the next step during this one: one step off-policy",
        aliases=("async_generate",),
        tasks=RL,
    )
    environment: str | None = option(
        None,
        "FILE.py:NAME of the environment for multi-turn rollouts",
        aliases=("multi_turn_scheduler",),
        tasks=RL,
        metavar="FILE.py:NAME",
    )
    max_turns: int | None = option(
        None,
        "Most model turns in an environment; unset: no limit",
        aliases=("max_tool_calling_iterations",),
        minimum=1,
        unit="turns",
        tasks=RL,
    )

    max_completion_length: int = option(
        512,
        "Longest completion; the prompt gets the rest of max_length",
        aliases=("response_length", "max_new_tokens"),
        minimum=1,
        unit="tokens",
        tasks=RL,
    )
    temperature: float = option(
        1.0, "Divides the logits, in sampling and in the policy's probabilities", above=0, tasks=RL
    )
    top_p: float = option(
        1.0, "Nucleus sampling: the likeliest tokens with this total probability", above=0, maximum=1, tasks=RL
    )
    top_k: int = option(0, "Sample from this many of the likeliest tokens; 0: all", minimum=0, tasks=RL)
    min_p: float | None = option(
        None,
        "Sample from tokens with at least this share of the top probability",
        minimum=0,
        maximum=1,
        tasks=RL,
        metavar="P",
    )
    repetition_penalty: float = option(1.0, "Above 1: tokens that already occur become less likely", above=0, tasks=RL)
    allow_biased_sampling: bool = option(
        False, "Accept top_p, top_k, min_p, repetition_penalty: they bias the gradient", tasks=RL
    )
    rollout_backend: str = option(
        "transformers",
        "Sampler: in this process, or a separate server",
        aliases=("use_vllm", "vllm_mode"),
        choices=BACKENDS,
        spellings=BACKEND_SPELLINGS,
        tasks=RL,
    )
    rollout_batch_size: int = option(64, "Concurrent completions per sampler or server", minimum=1, tasks=RL)
    rollout_sleep: bool = option(
        False, "Free the sampler's memory during training steps", aliases=("vllm_enable_sleep_mode",), tasks=RL
    )
    rollout_server_url: tuple[str, ...] = option(
        (),
        "URLs of the sampler's servers; unset: the default port on this machine",
        aliases=("vllm_server_base_url", "sglang_server_base_url"),
        tasks=RL,
        metavar="URL...",
    )
    rollout_server_timeout: float = option(
        600.0,
        "Timeout of a request to the sampler's server",
        aliases=("vllm_server_timeout",),
        above=0,
        unit="seconds",
        tasks=RL,
    )
    rollout_sync_folder: str | None = option(
        None, "Folder for weight sync to servers and of adapters; unset: in output_dir", tasks=RL, metavar="DIR"
    )
    rollout_lora: bool | None = option(
        None,
        "Sync only LoRA adapters, not merged weights; unset: where supported",
        aliases=("vllm_enable_lora",),
        tasks=RL,
    )
    vllm_gpu_memory_utilization: float = option(
        0.3, "Share of each GPU's memory for the in-process vLLM", above=0, maximum=1, tasks=RL
    )
    offload_model: bool = option(False, "Offload the model's weights to CPU during sampling", tasks=RL)
    offload_optimizer: bool = option(False, "Offload gradients and optimizer states to CPU during sampling", tasks=RL)

    reward_funcs: tuple[str, ...] = option(
        (),
        "Rewards: accuracy, format, ... (docs/rewards.md), or FILE.py:function",
        aliases=("reward_functions",),
        tasks=RL,
    )
    reward_model: tuple[str, ...] = option((), "Folders of reward models", tasks=RL, metavar="DIR...")
    reward_weights: tuple[float, ...] = option(
        (), "Weight of each of reward_funcs, then of reward_model; unset: 1 each", tasks=RL, metavar="NUMBER..."
    )
    cosine_min_len_value_wrong: float = option(-0.5, "Reward cosine: of a wrong answer without length", tasks=RL)
    cosine_max_len_value_wrong: float = option(0.0, "Reward cosine: of a wrong answer of cosine_max_len", tasks=RL)
    cosine_min_len_value_correct: float = option(1.0, "Reward cosine: of a right answer without length", tasks=RL)
    cosine_max_len_value_correct: float = option(0.5, "Reward cosine: of a right answer of cosine_max_len", tasks=RL)
    cosine_max_len: int | None = option(
        None, "Reward cosine: the longest answer; unset: max_completion_length", minimum=1, unit="tokens", tasks=RL
    )
    repetition_n_grams: int = option(
        3, "Reward repetition: tokens that count as one when they recur", minimum=1, unit="tokens", tasks=RL
    )
    repetition_max_penalty: float = option(
        -1.0, "Reward repetition: of an answer that only repeats itself", maximum=0, tasks=RL
    )
    soft_max_length: int | None = option(
        None, "Reward soft_overlong: -1 from here on; unset: max_completion_length", minimum=1, unit="tokens", tasks=RL
    )
    soft_cache_length: int | None = option(
        None, "Reward soft_overlong: tokens before that, over which it falls to -1", minimum=1, unit="tokens", tasks=RL
    )

    code_timeout: float = option(
        6.0, "Reward code: longest run of one test of a program", above=0, unit="seconds", tasks=RL
    )
    code_memory: int = option(
        512, "Reward code: most memory of one test of a program", minimum=16, unit="MiB", tasks=RL
    )
    allow_unsafe_code: bool = option(False, "Reward code: run programs even where this system has no sandbox", tasks=RL)

    advantage_estimator: str | None = option(
        None,
        "How rewards become advantages; unset: grpo, of ppo gae",
        choices=estimator_names(),
        choices_of={task: estimator_names(task) for task in ("grpo", "ppo")},
        tasks=RL,
        metavar="NAME",
    )
    pass_at_k: int = option(
        4, "Completions of which one should pass; a reward above 0 passes", minimum=1, unit="completions", tasks=GRPO
    )
    scale_rewards: str = option(
        "group",
        "Divide advantages by the standard deviation of the group or the batch",
        choices=("group", "batch", "none"),
        spellings={"true": "group", "false": "none"},
        tasks=GRPO,
    )
    multi_objective_aggregation: str = option(
        "sum_then_normalize",
        "Several rewards: summed first or normalised first (GDPO, arXiv:2601.05242)",
        choices=("sum_then_normalize", "normalize_then_sum"),
        tasks=GRPO,
    )
    kl_in_reward: bool | None = option(
        None, "KL penalty in the rewards, not in the loss; unset: by the estimator", tasks=RL
    )
    kl_estimator: str | None = option(
        None,
        "KL estimator; unset: k3 in the loss, k1 in rewards",
        choices=("k1", "k2", "k3"),
        tasks=RL,
        metavar="NAME",
    )
    kl_controller: str = option(
        "fixed", "Fixed beta, or adapted towards target_kl (arXiv:1909.08593)", choices=("fixed", "adaptive"), tasks=RL
    )
    target_kl: float = option(
        6.0, "Target KL per completion of the adaptive controller", above=0, unit="nats", tasks=RL
    )
    kl_horizon: int = option(10000, "Horizon of the adaptive controller", minimum=1, unit="completions", tasks=RL)

    epsilon: float = option(
        0.2, "Clip of the probability ratio", aliases=("cliprange", "epsilon_low"), minimum=0, tasks=RL
    )
    epsilon_high: float | None = option(
        None, "Upper clip; unset: epsilon. For cispo the largest ratio; unset: 5", minimum=0, tasks=RL, metavar="X"
    )
    delta: float | None = option(
        None,
        "Upper bound of the ratio for negative advantages (arXiv:2505.07291)",
        above=1,
        tasks=RL,
        metavar="X",
    )
    importance_sampling_level: str = option(
        "token",
        "Ratio of a token, of a completion (GSPO, arXiv:2507.18071), or GSPO-token",
        choices=("token", "sequence", "sequence_token"),
        tasks=GRPO,
    )
    mask_truncated_completions: bool = option(
        False, "Exclude truncated completions from the loss", aliases=("overlong_filter",), tasks=RL
    )
    top_entropy_quantile: float = option(
        1.0,
        "Share of the tokens in the loss, those of highest entropy (arXiv:2506.01939)",
        minimum=0,
        maximum=1,
        tasks=RL,
    )
    entropy_coef: float = option(0.0, "Weight of the entropy bonus", minimum=0, tasks=RL)
    off_policy_mask_threshold: float | None = option(
        None,
        "Mask off-policy completions of negative advantage (arXiv:2512.02556)",
        aliases=("off_policy_sequence_mask_delta",),
        above=0,
        tasks=RL,
        metavar="X",
    )
    use_bias_correction_kl: bool | None = option(
        None, "Multiply the KL in the loss by the ratio (arXiv:2512.02556); unset: not for k2", tasks=RL
    )
    loss_agg_mode: str | None = option(
        None,
        "Normaliser of the policy's loss, under verl's names; unset: that of loss_type",
        choices=AGG_MODES,
        tasks=RL,
        metavar="MODE",
    )
    use_rollout_logprobs: bool = option(
        False,
        "Take the sampler's log-probabilities as those of the old policy",
        aliases=("bypass_mode",),
        tasks=RL,
    )
    clip_cov_ratio: float = option(0.0002, "Part of the tokens left out of the loss", above=0, maximum=1, tasks=GRPO)
    clip_cov_lb: float = option(1.0, "Lower bound of the covariance of those tokens", tasks=GRPO)
    clip_cov_ub: float = option(5.0, "Upper bound of the covariance of those tokens", tasks=GRPO)
    kl_cov_ratio: float = option(
        0.0002, "Part of the tokens with a KL penalty, those of largest covariance", above=0, maximum=1, tasks=GRPO
    )
    kl_cov_coef: float = option(1.0, "Weight of that KL penalty", aliases=("ppo_kl_coef",), minimum=0, tasks=GRPO)
    sapo_temperature_pos: float = option(1.0, "Temperature where the advantage is positive", above=0, tasks=GRPO)
    sapo_temperature_neg: float = option(1.05, "Temperature elsewhere", above=0, tasks=GRPO)
    vespo_k_pos: float = option(2.0, "Exponent where the advantage is positive", minimum=0, tasks=GRPO)
    vespo_lambda_pos: float = option(3.0, "Decay where the advantage is positive", minimum=0, tasks=GRPO)
    vespo_k_neg: float = option(3.0, "Exponent elsewhere", minimum=0, tasks=GRPO)
    vespo_lambda_neg: float = option(2.0, "Decay elsewhere", minimum=0, tasks=GRPO)
    importance_sampling_correction: bool | None = option(
        None,
        "Correct for the sampler's mismatch; unset: off for transformers unless async",
        aliases=("vllm_importance_sampling_correction",),
        tasks=RL,
    )
    importance_sampling_mode: str = option(
        "token_truncate",
        "Level of the correction; weights beyond the bounds are truncated or masked",
        aliases=("vllm_importance_sampling_mode", "rollout_importance_sampling_mode"),
        choices=MODES,
        tasks=RL,
    )
    importance_sampling_clip_max: float | None = option(
        3.0,
        "Upper bound of these weights; none: no bound",
        aliases=(
            "vllm_importance_sampling_clip_max",
            "vllm_importance_sampling_cap",
            "rollout_importance_sampling_threshold",
        ),
        above=0,
        tasks=RL,
    )
    importance_sampling_clip_min: float | None = option(
        None,
        "Lower bound of these weights; unset: no bound",
        aliases=("vllm_importance_sampling_clip_min",),
        minimum=0,
        tasks=RL,
        metavar="X",
    )
    importance_sampling_filter_max: float | None = option(
        None,
        "Mask completions whose weights have a larger geometric mean",
        above=0,
        tasks=RL,
        metavar="X",
    )
    importance_sampling_filter_min: float | None = option(
        None,
        "Mask completions whose weights have a smaller geometric mean; unset: no bound",
        minimum=0,
        tasks=RL,
        metavar="X",
    )

    critic_model: str | None = option(
        None, "Folder of the initial critic; unset: the model", aliases=("value_model",), tasks=PPO, metavar="DIR"
    )
    critic_learning_rate: float | None = option(
        None, "Learning rate of the critic; unset: learning_rate", above=0, tasks=PPO, metavar="X"
    )
    vf_coef: float = option(0.1, "Weight of the critic's loss", minimum=0, tasks=PPO)
    cliprange_value: float = option(0.2, "Value clip range", above=0, tasks=PPO)
    gamma: float = option(1.0, "Discount of later rewards, a token", above=0, maximum=1, tasks=RL)
    lam: float = option(
        0.95, "Lambda of gae (arXiv:1506.02438)", aliases=("gae_lambda",), minimum=0, maximum=1, tasks=PPO
    )
    whiten_rewards: bool = option(False, "Scale a batch's rewards to unit standard deviation", tasks=PPO)
    whiten_advantages: bool | None = option(
        None,
        "Whiten the advantages of a batch; unset: with gae",
        aliases=("normalize_advantages",),
        tasks=RL,
    )

    log_completions: bool = option(
        True, "Write completions with their rewards to completions.jsonl and the report", tasks=RL
    )
    num_completions_to_print: int | None = option(
        None, "Completions logged per step; unset: all", minimum=1, unit="completions", tasks=RL
    )
