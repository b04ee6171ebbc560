"""Options of reinforcement learning without effect. Conflicts: `rl_conflict_rules.py`. Names of rewards and backends
are checked where they are registered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megaswift.config.advantage_estimator_table import ESTIMATOR_OPTIONS, advantage_estimators_reading
from megaswift.config.loss_option_rules import ignored_by_loss_rules
from megaswift.config.preference import beta_of
from megaswift.config.rl import SERVERS
from megaswift.config.rl_defaults import (
    advantage_estimator_entry_of,
    biasing_sampling_options,
    corrects_sampler_mismatch,
    kl_in_reward_of,
    policy_loss_of,
)
from megaswift.config.rl_vllm import VllmSamplerConfig
from megaswift.config.rule_types import IgnoredOption, Test, join_names


def _rows(names: Iterable[str], reads: tuple[str, ...], when: Test, why: str, fix: str) -> Iterator[IgnoredOption]:
    return (IgnoredOption(name, reads, when, why, fix) for name in names)


def _strict(names: Iterable[str], reads: tuple[str, ...], when: Test, why: str, fix: str) -> Iterator[IgnoredOption]:
    """Numbers of which none says by itself that it plays no part."""
    return (IgnoredOption(name, reads, when, why, fix, (None,)) for name in names)


def _ignored_by_estimator() -> Iterator[IgnoredOption]:
    """A rule for each option that only some estimators read."""
    for option, neutral in ESTIMATOR_OPTIONS.items():
        readers = advantage_estimators_reading(option, "grpo")
        why = f"applies only to advantage_estimator {join_names(advantage_estimators_reading(option))}"
        yield IgnoredOption(option, _GAE, _unestimated(option), why, f"--advantage_estimator {readers[0]}", neutral)


def _unestimated(option: str) -> Test:
    return lambda c: option not in advantage_estimator_entry_of(c).reads


def _unrewarded(name: str) -> Test:
    return lambda c: not any(name in f for f in c.rl.reward_funcs if ":" not in f)  # under TRL's names too


def _other_backend(*names: str) -> Test:
    return lambda c: c.rl.rollout_backend not in names


_LOSS, _BACKEND, _FUNCS, _GAE = ("loss_type",), ("rollout_backend",), ("reward_funcs",), ("advantage_estimator",)
_PULL = ("beta", "kl_in_reward", "advantage_estimator")
_NO_PULL: Test = lambda c: beta_of(c) == 0  # noqa: E731
_NO_ENVIRONMENT: Test = lambda c: c.rl.environment is None  # noqa: E731
_UNCORRECTED: Test = lambda c: not corrects_sampler_mismatch(c)  # noqa: E731
_CORRECTION = ("importance_sampling_correction", "rollout_backend", "async_generation")
_SERVER_FIX, _VLLM_FIX = "--rollout_backend vllm_server", "--rollout_backend vllm"
_VLLM_ONLY = "applies only to rollout_backend vllm; a server gets its settings when it is started"
_ZERO = "beta is 0, so there is no KL penalty"

RL_IGNORED: tuple[IgnoredOption, ...] = (
    *ignored_by_loss_rules("grpo"),
    *_ignored_by_estimator(),
    IgnoredOption(
        "scale_rewards",
        ("multi_objective_aggregation",),
        lambda c: c.rl.multi_objective_aggregation == "normalize_then_sum",
        "normalize_then_sum always divides by the standard deviation of the group, then by that of the batch",
        "--multi_objective_aggregation sum_then_normalize",
        (),
    ),
    IgnoredOption("kl_in_reward", ("beta",), _NO_PULL, _ZERO, "--beta 0.01"),
    IgnoredOption(
        "kl_controller",
        _PULL,
        lambda c: not kl_in_reward_of(c),
        "it adapts the coefficient of a KL penalty in the rewards",
        "--beta 0.01 --kl_in_reward true",
        ("fixed",),
    ),
    IgnoredOption("kl_estimator", ("beta",), _NO_PULL, _ZERO, "--beta 0.01"),
    IgnoredOption(
        "use_bias_correction_kl",
        _PULL,
        lambda c: beta_of(c) == 0 or kl_in_reward_of(c),
        "the loss has no KL term",
        "--beta 0.01 --kl_in_reward false",
        (False,),
    ),
    *_rows(
        ("target_kl", "kl_horizon"),
        ("kl_controller",),
        lambda c: c.rl.kl_controller != "adaptive",
        "applies only to kl_controller adaptive",
        "--kl_controller adaptive",
    ),
    *_rows(
        ("code_timeout", "code_memory", "allow_unsafe_code"),
        _FUNCS,
        _unrewarded("code"),
        "applies only to the reward function code",
        "--reward_funcs ... code",
    ),
    IgnoredOption(
        "importance_sampling_level",
        (*_LOSS, *_GAE),
        lambda c: policy_loss_of(c) == "rloo",
        "loss_type rloo uses one ratio per completion",
        "--loss_type grpo",
        (),
    ),
    *_rows(
        ("max_resample_times",),
        ("dynamic_sample",),
        lambda c: not c.rl.dynamic_sample,
        "needs dynamic_sample",
        "--dynamic_sample true",
    ),
    *_rows(("max_turns",), ("environment",), _NO_ENVIRONMENT, "needs an environment", "--environment FILE.py:NAME"),
    *_rows(
        ("soft_max_length", "soft_cache_length"),
        _FUNCS,
        _unrewarded("soft_overlong"),
        "applies only to the reward function soft_overlong",
        "--reward_funcs ... soft_overlong",
    ),
    *_strict(
        (
            "cosine_min_len_value_wrong",
            "cosine_max_len_value_wrong",
            "cosine_min_len_value_correct",
            "cosine_max_len_value_correct",
            "cosine_max_len",
        ),
        _FUNCS,
        _unrewarded("cosine"),
        "applies only to the reward function cosine",
        "--reward_funcs ... cosine",
    ),
    *_strict(
        ("repetition_n_grams", "repetition_max_penalty"),
        _FUNCS,
        _unrewarded("repetition"),
        "applies only to the reward function repetition",
        "--reward_funcs ... repetition",
    ),
    *_rows(
        ("rollout_sleep",),
        _BACKEND,
        _other_backend("transformers", "vllm"),
        "rollout_backend {rollout_backend} runs outside the training process",
        _VLLM_FIX,
    ),
    *_rows(
        ("rollout_server_url", "rollout_server_timeout"),
        _BACKEND,
        _other_backend(*SERVERS),
        "rollout_backend {rollout_backend} is not a server",
        _SERVER_FIX,
    ),
    *_rows(
        ("rollout_weight_transport", "rollout_changed_weights_only"),
        _BACKEND,
        _other_backend("vllm_server"),
        "applies only to rollout_backend vllm_server",
        _SERVER_FIX,
    ),
    IgnoredOption(
        "rollout_sync_folder",
        (*_BACKEND, "train_type", "rollout_lora"),
        lambda c: _other_backend(*SERVERS)(c) and (c.model.train_type == "full" or c.rl.rollout_lora is False),
        "rollout_backend {rollout_backend} is not a server, and adapters are not sent separately",
        f"{_SERVER_FIX}, or --train_type lora",
    ),
    IgnoredOption(
        "rollout_lora",
        ("train_type",),
        lambda c: c.model.train_type == "full",
        "no adapters are trained",
        "--train_type lora",
    ),
    *_rows(
        ("vllm_gpu_memory_utilization", "vllm_enforce_eager"),
        _BACKEND,
        _other_backend("vllm"),
        _VLLM_ONLY,
        _VLLM_FIX,
    ),
    *_strict(
        (
            name
            for name in VllmSamplerConfig.__dataclass_fields__
            if name.startswith("vllm_") and name not in ("vllm_enforce_eager", "vllm_seed_requests")
        ),
        _BACKEND,
        _other_backend("vllm"),
        _VLLM_ONLY,
        _VLLM_FIX,
    ),
    *_strict(
        ("vllm_seed_requests",),
        _BACKEND,
        _other_backend("vllm", "vllm_server"),
        "applies only to rollout_backend vllm and vllm_server",
        _VLLM_FIX,
    ),
    IgnoredOption(
        "allow_biased_sampling",
        ("top_p", "top_k", "min_p", "repetition_penalty"),
        lambda c: not biasing_sampling_options(c),
        "completions are sampled from the policy's own distribution",
        "--top_p 0.9",
    ),
    *_strict(
        (
            "importance_sampling_mode",
            "importance_sampling_clip_max",
            "importance_sampling_clip_min",
            "importance_sampling_filter_max",
            "importance_sampling_filter_min",
        ),
        _CORRECTION,
        _UNCORRECTED,
        "no importance weights are applied",
        "--importance_sampling_correction true",
    ),
    *_rows(
        ("num_completions_to_print",),
        ("log_completions",),
        lambda c: not c.rl.log_completions,
        "needs log_completions",
        "--log_completions true",
    ),
)
