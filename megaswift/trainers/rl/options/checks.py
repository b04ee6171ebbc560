"""Rules of reinforcement learning: conflicting options, and missing requirements."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megaswift.bridge.adapters.options.checks import base_quantization_bits, non_lora_peft_method_of
from megaswift.config.rule import ConflictingOptions, Test
from megaswift.config.sections import Sections
from megaswift.engine.options.engine_checks import capabilities_of
from megaswift.errors import Problem
from megaswift.losses.options.preference import beta_of
from megaswift.losses.options.required_values import value_required_by_loss_rules
from megaswift.options.tasks import GRPO, PPO, RL
from megaswift.rollout.options.rollout import SERVERS
from megaswift.trainers.rl.options.derived import (
    advantage_estimator_entry_of,
    biasing_sampling_options,
    corrects_sampler_mismatch,
    generations_per_prompt_of,
    kl_estimator_of,
    kl_in_reward_of,
    policy_loss_of,
    samples_ahead,
    weighs_kl_by_ratio,
    writes_draws_side_by_side,
)

ALONE = 2
"""Completions of a prompt that a comparison within its group takes."""
UPLOADED = ("hf", "adapter", "checkpoints")
"""Folders of a run's output that a hub may get."""
REINFORCES = ("cispo", "vespo")
"""Loss types whose ratio carries no gradient, so that each token keeps its own advantage."""


def _rl(test: Test) -> Test:
    return lambda c: c.task in RL and test(c)


def _saves_among_uploads(c: Sections) -> bool:
    if c.rollout.save_rollouts is None:
        return False
    saved = Path(os.path.abspath(c.rollout.save_rollouts))
    run = Path(os.path.abspath(c.checkpoint.output_dir))
    return any(saved.is_relative_to(run / name) for name in UPLOADED)


def _overlong(c: Sections) -> bool:
    return any("soft_overlong" in f for f in c.rewards.reward_funcs if ":" not in f)  # under TRL's names too


def _cross(low: float | None, high: float | None) -> bool:
    return low is not None and high is not None and low >= high


def _no_bound(c: Sections) -> bool:
    rl = c.rl
    bounds = (rl.importance_sampling_clip_min, rl.importance_sampling_clip_max)
    filters = (rl.importance_sampling_filter_min, rl.importance_sampling_filter_max)
    none = bounds == filters == (None, None)
    return corrects_sampler_mismatch(c) and rl.importance_sampling_mode.endswith("_truncate") and none


def _tail_is_all(c: Sections) -> bool:
    tail = c.rewards.soft_cache_length
    return _overlong(c) and tail is not None and tail >= (c.rewards.soft_max_length or c.rollout.max_completion_length)


def _is_plain_lora(c: Sections) -> bool:
    return non_lora_peft_method_of(c) is None and not c.lora.use_dora


def _kl_in_loss(c: Sections) -> bool:
    return c.task in RL and beta_of(c) > 0 and not kl_in_reward_of(c)


def _averaged(c: Sections) -> bool:
    whole = c.rl.importance_sampling_level == "sequence" and policy_loss_of(c) not in (*REINFORCES, "rloo")
    return advantage_estimator_entry_of(c).per_token and whole


def _biased(option: str) -> Test:
    return lambda c: c.task in RL and option in biasing_sampling_options(c) and not c.rollout.allow_biased_sampling


_GAE = ("advantage_estimator",)
_NEUTRAL = {"top_p": "1", "top_k": "0", "min_p": "0", "repetition_penalty": "1"}


def _ranks_share_engines(c: Sections) -> bool:
    return c.vllm.vllm_tensor_parallel_size > 1 and c.placement.sampler_engines is None


def _holds_prompts_out(c: Sections) -> bool:
    return bool(c.data.val_dataset) or c.data.split_dataset_ratio > 0


def sends_weights_in_files(c: Sections) -> bool:
    """Return whether samplers read weights, or adapters alone, from a folder."""
    sends_adapters = c.model.train_type != "full" and c.rollout.rollout_lora is not False
    return c.rollout.rollout_backend in SERVERS or c.placement.sampler_engines is not None or sends_adapters


RL_CLASHES: tuple[ConflictingOptions, ...] = (
    ConflictingOptions(
        _GAE, lambda c: c.task in GRPO and advantage_estimator_entry_of(c).critic, "needs a critic", "megaswift ppo"
    ),
    ConflictingOptions(
        _GAE,
        lambda c: c.task in PPO and not advantage_estimator_entry_of(c).critic,
        "does not use the critic that ppo trains",
        "megaswift grpo",
    ),
    ConflictingOptions(
        ("num_generations", "advantage_estimator"),
        lambda c: c.task in GRPO and generations_per_prompt_of(c) < ALONE and advantage_estimator_entry_of(c).compares,
        "leaves nothing to compare: the advantage estimator compares the completions of a prompt",
        "--num_generations 8, or --advantage_estimator reinforce_plus_plus",
    ),
    ConflictingOptions(
        ("pass_at_k", "num_generations", "advantage_estimator"),
        # an estimator of a plugin may read every option
        lambda c: c.rl.advantage_estimator == "pass_at_k" and c.rl.pass_at_k > generations_per_prompt_of(c),
        "exceeds the number of completions per prompt",
        "--num_generations 8",
    ),
    ConflictingOptions(
        ("advantage_estimator", "kl_in_reward", "beta"),
        lambda c: advantage_estimator_entry_of(c).binary and kl_in_reward_of(c),
        "uses only whether a reward is above 0, so a KL penalty cannot be part of the rewards",
        "--kl_in_reward false",
    ),
    ConflictingOptions(
        ("importance_sampling_correction", "use_rollout_logprobs"),
        lambda c: c.rl.use_rollout_logprobs and corrects_sampler_mismatch(c),
        "corrects for the ratio between old policy and sampler, which is 1 with use_rollout_logprobs",
        "--importance_sampling_correction false",
    ),
    ConflictingOptions(
        ("clip_cov_lb", "clip_cov_ub"),
        lambda c: _cross(c.rl.clip_cov_lb, c.rl.clip_cov_ub),
        "is not below clip_cov_ub {clip_cov_ub}",
        "--clip_cov_lb 1",
    ),
    ConflictingOptions(
        ("generation_batch_size", "steps_per_generation"),
        lambda c: c.rl.generation_batch_size is not None and c.rl.steps_per_generation is not None,
        "is set twice, by generation_batch_size and by steps_per_generation",
        "keep one of the two",
    ),
    ConflictingOptions(
        ("max_completion_length", "max_length"),
        _rl(lambda c: c.rollout.max_completion_length >= c.data.max_length),
        "leaves no room for the prompt within max_length {max_length}",
        "use a larger --max_length, which counts prompt and completion",
    ),
    ConflictingOptions(
        ("truncation_strategy",),
        _rl(lambda c: c.data.truncation_strategy in ("right", "split")),
        "would remove the end of prompts",
        "--truncation_strategy delete",
    ),
    ConflictingOptions(
        ("streaming",),
        _rl(lambda c: c.data.streaming),
        "is not supported for prompts, which are tokenized before training",
        "--streaming false",
    ),
    ConflictingOptions(
        ("reward_weights", "reward_funcs", "reward_model"),
        lambda c: len(c.rewards.reward_weights) not in (0, len(c.rewards.reward_funcs) + len(c.rewards.reward_model)),
        "must have one number for each of reward_funcs, then for each reward_model",
        "give --reward_weights as many numbers",
    ),
    ConflictingOptions(
        ("reward_funcs", "soft_cache_length"),
        lambda c: _overlong(c) and c.rewards.soft_cache_length is None,
        "soft_overlong needs soft_cache_length, the number of tokens over which the reward falls to -1",
        "--soft_cache_length 128",
    ),
    ConflictingOptions(
        ("soft_cache_length", "reward_funcs", "soft_max_length", "max_completion_length"),
        _tail_is_all,
        "must be less than soft_max_length (unset: max_completion_length)",
        "--soft_cache_length 128",
    ),
    *(
        ConflictingOptions(
            (option, "allow_biased_sampling"),
            _biased(option),
            "samples from a distribution other than the policy's, which no importance ratio corrects: the gradient "
            "is biased",
            f"--{option} {value}, or --allow_biased_sampling true to accept the bias",
        )
        for option, value in _NEUTRAL.items()
    ),
    ConflictingOptions(
        ("dynamic_sample", "num_generations", "advantage_estimator"),
        lambda c: (
            c.rl.dynamic_sample
            and generations_per_prompt_of(c) < ALONE
            and not advantage_estimator_entry_of(c).compares
        ),
        "compares the rewards of a prompt's completions, but num_generations is 1",
        "--num_generations 8",
    ),
    ConflictingOptions(
        ("multi_objective_aggregation", "kl_in_reward", "beta"),
        lambda c: c.rl.multi_objective_aggregation == "normalize_then_sum" and kl_in_reward_of(c),
        "normalizes each reward function separately, so a KL penalty cannot be part of the rewards",
        "--kl_in_reward false",
    ),
    ConflictingOptions(
        ("use_bias_correction_kl", "kl_estimator", "beta", "kl_in_reward"),
        lambda c: _kl_in_loss(c) and kl_estimator_of(c) == "k1" and not weighs_kl_by_ratio(c),
        "gives kl_estimator k1 a gradient with mean 0",
        "--use_bias_correction_kl true, or --kl_estimator k3",
    ),
    ConflictingOptions(
        ("use_bias_correction_kl", "kl_estimator", "beta", "kl_in_reward"),
        lambda c: _kl_in_loss(c) and kl_estimator_of(c) == "k2" and weighs_kl_by_ratio(c),
        "makes the gradient of kl_estimator k2 differ from that of the KL divergence; without it k2 is correct",
        "--use_bias_correction_kl false, or --kl_estimator k3",
    ),
    *value_required_by_loss_rules("grpo"),
    ConflictingOptions(
        ("loss_type", "advantage_estimator"),
        lambda c: policy_loss_of(c) == "rloo" and advantage_estimator_entry_of(c).per_token,
        "takes one ratio per completion, which averages away the per-token advantages of {advantage_estimator}",
        "--loss_type dapo",
    ),
    ConflictingOptions(
        ("importance_sampling_level", "advantage_estimator", "loss_type"),
        _averaged,
        "takes one ratio per completion, which averages away the per-token advantages of {advantage_estimator}",
        "--importance_sampling_level sequence_token (GSPO-token)",
    ),
    ConflictingOptions(
        (
            "importance_sampling_mode",
            "loss_type",
            "importance_sampling_correction",
            "rollout_backend",
            "async_generation",
            "max_staleness",
        ),
        lambda c: (
            policy_loss_of(c) == "vespo"
            and corrects_sampler_mismatch(c)
            and not c.rl.importance_sampling_mode.startswith("token")
        ),
        "loss_type vespo needs token-level weights",
        "--importance_sampling_mode token_truncate",
    ),
    ConflictingOptions(
        ("importance_sampling_clip_min", "importance_sampling_clip_max"),
        lambda c: _cross(c.rl.importance_sampling_clip_min, c.rl.importance_sampling_clip_max),
        "is not below importance_sampling_clip_max {importance_sampling_clip_max}",
        "--importance_sampling_clip_min 0.5",
    ),
    ConflictingOptions(
        ("importance_sampling_filter_min", "importance_sampling_filter_max"),
        lambda c: _cross(c.rl.importance_sampling_filter_min, c.rl.importance_sampling_filter_max),
        "is not below importance_sampling_filter_max {importance_sampling_filter_max}",
        "--importance_sampling_filter_min 0.5",
    ),
    ConflictingOptions(
        ("importance_sampling_mode", "importance_sampling_clip_min", "importance_sampling_clip_max"),
        _no_bound,
        "needs a bound at which to truncate the weights",
        "--importance_sampling_clip_max 3",
    ),
    ConflictingOptions(
        ("async_generation", "max_staleness", "offload_model", "offload_optimizer", "rollout_sleep"),
        lambda c: (
            samples_ahead(c) and (c.rollout.offload_model or c.rollout.offload_optimizer or c.rollout.rollout_sleep)
        ),
        "samples during training, so the sampler and the trainer cannot use the memory in turn",
        "leave out --offload_model, --offload_optimizer and --rollout_sleep",
    ),
    ConflictingOptions(
        ("async_generation", "max_staleness"),
        lambda c: c.rollout.async_generation and c.rollout.max_staleness > 0,
        "sets max_staleness to the optimizer steps of a generation",
        "leave out one of the two",
    ),
    ConflictingOptions(
        ("staleness_strategy", "max_staleness"),
        lambda c: c.rollout.staleness_strategy == "drop" and not c.rollout.max_staleness,
        "has no effect without max_staleness: there is one draw at a time",
        "--max_staleness 4",
    ),
    ConflictingOptions(
        ("staleness_strategy", "rollout_backend", "sampler_engines", "environment"),
        lambda c: c.rollout.staleness_strategy == "drop" and not writes_draws_side_by_side(c),
        "has no effect: only servers and engines, without an environment, sample several draws at the same time",
        "--sampler_engines 2, without --environment",
    ),
    ConflictingOptions(
        ("partial_rollouts", "max_staleness"),
        lambda c: c.rollout.partial_rollouts and not c.rollout.max_staleness,
        "has no effect without max_staleness: no completion is under way when weights are sent",
        "--max_staleness 4",
    ),
    ConflictingOptions(
        ("partial_rollouts", "environment"),
        lambda c: c.rollout.partial_rollouts and c.rollout.environment is not None,
        "is not supported with an environment, whose turns cannot be interrupted",
        "leave out --partial_rollouts",
    ),
    ConflictingOptions(
        ("save_rollouts", "replay_rollouts"),
        lambda c: c.rollout.save_rollouts is not None and c.rollout.replay_rollouts is not None,
        "is not supported with replay_rollouts, whose folder has these generations",
        "leave out --save_rollouts",
    ),
    ConflictingOptions(
        ("save_rollouts", "output_dir"),
        _saves_among_uploads,
        "is inside a folder of the run whose files --push_to_hub uploads",
        "--save_rollouts OUT/rollouts, beside the weights and checkpoints of the run",
    ),
    ConflictingOptions(
        ("replay_rollouts", "val_dataset", "split_dataset_ratio"),
        lambda c: c.rollout.replay_rollouts is not None and _holds_prompts_out(c),
        "has no sampler to answer held-out prompts",
        "leave out --val_dataset and --split_dataset_ratio",
    ),
    ConflictingOptions(
        ("vllm_tensor_parallel_size", "async_generation", "max_staleness", "sampler_engines"),
        lambda c: _ranks_share_engines(c) and samples_ahead(c),
        "is not supported during training: collectives of sampling and training would run in different orders",
        "--sampler_engines 1, or --rollout_backend vllm_server with a server of that tensor parallel size",
    ),
    ConflictingOptions(
        ("sampler_engines", "rollout_backend"),
        lambda c: c.placement.sampler_engines is not None and c.rollout.rollout_backend == "vllm_server",
        "starts its own servers, but rollout_backend vllm_server is for servers that you start",
        "--rollout_backend vllm",
    ),
    ConflictingOptions(
        ("sampler_engines", "rollout_server_url"),
        lambda c: c.placement.sampler_engines is not None and bool(c.rollout.rollout_server_url),
        "starts its own servers",
        "leave out --rollout_server_url",
    ),
    ConflictingOptions(
        ("sampler_engines", "rollout_sleep"),
        lambda c: c.placement.sampler_engines is not None and c.rollout.rollout_sleep,
        "has devices of its own, which the trainer does not use",
        "leave out --rollout_sleep",
    ),
    ConflictingOptions(
        ("sampler_engines", "replay_rollouts"),
        lambda c: c.placement.sampler_engines is not None and c.rollout.replay_rollouts is not None,
        "is not used with replay_rollouts, which needs no sampler",
        "leave out --sampler_engines",
    ),
    ConflictingOptions(
        ("train_type", "quantization_bit"),
        lambda c: (
            (c.task in RL or bool(c.evaluation.eval_tasks))
            and not capabilities_of(c).merges_quantized
            and base_quantization_bits(c) is not None
            and not _is_plain_lora(c)
        ),
        "on quantized weights cannot be merged for the sampler or eval_tasks without requantizing them",
        "--train_type lora, without use_dora",
    ),
    ConflictingOptions(
        ("adapters",),
        lambda c: c.task in PPO and c.lora.adapters is not None,
        "are adapters of the policy, from which the critic of ppo cannot be initialized",
        "merge them into --model (megaswift export --merge_lora true), then train new adapters",
    ),
    ConflictingOptions(
        ("freeze_parameters",),
        lambda c: c.task in PPO and bool(c.model.freeze_parameters),
        "is not supported by ppo: it would freeze the critic, too",
        "megaswift grpo",
    ),
)


def missing_reward_problems(c: Sections) -> Iterator[Problem]:
    """A run that nothing judges."""
    if c.task not in RL or advantage_estimator_entry_of(c).teacher:
        return
    if not c.rewards.reward_funcs and not c.rewards.reward_model and c.rollout.environment is None:
        yield Problem(
            "--reward_funcs",
            "is missing: completions need a reward",
            "--reward_funcs accuracy, --reward_funcs FILE.py:function, or --reward_model DIR",
        )
