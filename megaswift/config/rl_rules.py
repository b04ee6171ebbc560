"""What options of reinforcement learning mean together. Which rewards and which backends there are is known where these
live."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megaswift.config.adapter_rules import bits_of, method_of
from megaswift.config.data import GRPO, PPO, RL
from megaswift.config.engine_rules import is_native
from megaswift.config.preference import beta_of
from megaswift.config.rl import SERVERS, corrects_sampler, estimator_of, generations_of, kl_in_reward_of, policy_loss_of
from megaswift.config.rule import Clash, Ignored, Test
from megaswift.config.sections import Sections
from megaswift.errors import Problem

CLIPS = frozenset({"grpo", "bnpo", "dr_grpo", "dapo", "luspo", "rloo"})
"""Loss types that clip the ratio on both sides."""
CLIPS_ABOVE = CLIPS | {"cispo"}
ALONE = 2
"""Completions of a prompt that a comparison within its group takes."""


def _rl(test: Test) -> Test:
    return lambda c: c.task in RL and test(c)


def _rows(names: Iterable[str], reads: tuple[str, ...], when: Test, why: str, fix: str) -> Iterator[Ignored]:
    return (Ignored(name, reads, when, why, fix) for name in names)


def _strict(names: Iterable[str], reads: tuple[str, ...], when: Test, why: str, fix: str) -> Iterator[Ignored]:
    """Numbers of which none says by itself that it plays no part."""
    return (Ignored(name, reads, when, why, fix, (None,)) for name in names)


def _unrewarded(name: str) -> Test:
    return lambda c: not any(name in f for f in c.rl.reward_funcs if ":" not in f)  # under TRL's names too


def _other_loss(*types: str) -> Test:
    return lambda c: not {*types} & {policy_loss_of(c)}


def _other_backend(*names: str) -> Test:
    return lambda c: c.rl.rollout_backend not in names


def _overlong(c: Sections) -> bool:
    return not _unrewarded("soft_overlong")(c)


def _bounds_cross(c: Sections) -> bool:
    low, high = c.rl.importance_sampling_clip_min, c.rl.importance_sampling_clip_max
    return low is not None and high is not None and low >= high


def _no_bound(c: Sections) -> bool:
    bounds = (c.rl.importance_sampling_clip_min, c.rl.importance_sampling_clip_max)
    return corrects_sampler(c) and c.rl.importance_sampling_mode.endswith("_truncate") and bounds == (None, None)


def _tail_is_all(c: Sections) -> bool:
    tail = c.rl.soft_cache_length
    return _overlong(c) and tail is not None and tail >= (c.rl.soft_max_length or c.rl.max_completion_length)


def _is_plain_lora(c: Sections) -> bool:
    return method_of(c) is None and not c.lora.use_dora


_LOSS, _BACKEND, _FUNCS, _GAE = ("loss_type",), ("rollout_backend",), ("reward_funcs",), ("advantage_estimator",)
_PULL = ("beta", "kl_in_reward", "advantage_estimator")
_NO_PULL: Test = lambda c: beta_of(c) == 0  # noqa: E731
_NO_ENVIRONMENT: Test = lambda c: c.rl.environment is None  # noqa: E731
_UNCORRECTED: Test = lambda c: not corrects_sampler(c)  # noqa: E731
_NOT_GRPO: Test = lambda c: estimator_of(c) != "grpo"  # noqa: E731
_CORRECTION = ("importance_sampling_correction", "rollout_backend")
_SERVER_FIX, _VLLM_FIX = "--rollout_backend vllm_server", "--rollout_backend vllm"
_THEIRS = "loss_type {loss_type} does not read it"
_ZERO = "beta is 0: there is no reference to be near to"

RL_IGNORED: tuple[Ignored, ...] = (
    *_strict(("epsilon",), _LOSS, _other_loss(*CLIPS), _THEIRS, "--loss_type dapo"),
    *_strict(("epsilon_high",), _LOSS, _other_loss(*CLIPS_ABOVE), _THEIRS, "--loss_type dapo"),
    *_rows(("delta",), _LOSS, _other_loss(*CLIPS), _THEIRS, "--loss_type dapo"),
    *_rows(
        ("sapo_temperature_pos", "sapo_temperature_neg"),
        _LOSS,
        _other_loss("sapo"),
        "belongs to loss_type sapo",
        "--loss_type sapo",
    ),
    *_strict(
        ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        _LOSS,
        _other_loss("vespo"),
        "belongs to loss_type vespo",
        "--loss_type vespo",
    ),
    Ignored(
        "scale_rewards",
        _GAE,
        _NOT_GRPO,
        "{advantage_estimator} scales rewards in its own way",
        "--advantage_estimator grpo",
    ),
    Ignored(
        "multi_objective_aggregation",
        _GAE,
        _NOT_GRPO,
        "{advantage_estimator} adds rewards up",
        "--advantage_estimator grpo",
        ("sum_then_normalize",),
    ),
    Ignored("kl_in_reward", ("beta",), _NO_PULL, _ZERO, "--beta 0.01"),
    Ignored("kl_controller", ("beta",), _NO_PULL, _ZERO, "--beta 0.01", ("fixed",)),
    Ignored("kl_estimator", ("beta",), _NO_PULL, _ZERO, "--beta 0.01"),
    Ignored(
        "use_bias_correction_kl",
        _PULL,
        lambda c: beta_of(c) == 0 or kl_in_reward_of(c),
        "the loss has no divergence in it",
        "--beta 0.01 --kl_in_reward false",
        (False,),
    ),
    *_rows(
        ("target_kl", "kl_horizon"),
        ("kl_controller",),
        lambda c: c.rl.kl_controller != "adaptive",
        "belongs to kl_controller adaptive",
        "--kl_controller adaptive",
    ),
    *_rows(
        ("code_timeout", "code_memory", "allow_unsafe_code"),
        _FUNCS,
        _unrewarded("code"),
        "belongs to the reward code",
        "--reward_funcs ... code",
    ),
    Ignored(
        "whiten_advantages",
        _GAE,
        lambda c: estimator_of(c) not in ("gae", "rloo"),
        "{advantage_estimator} has a scale of its own",
        "--advantage_estimator rloo",
    ),
    Ignored(
        "importance_sampling_level",
        (*_LOSS, *_GAE),
        lambda c: policy_loss_of(c) == "rloo",
        "loss_type rloo weighs whole completions",
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
        "belongs to the reward soft_overlong",
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
        "belongs to the reward cosine",
        "--reward_funcs ... cosine",
    ),
    *_strict(
        ("repetition_n_grams", "repetition_max_penalty"),
        _FUNCS,
        _unrewarded("repetition"),
        "belongs to the reward repetition",
        "--reward_funcs ... repetition",
    ),
    *_rows(
        ("rollout_sleep",),
        _BACKEND,
        _other_backend("transformers", "vllm"),
        "{rollout_backend} is a program of its own",
        _VLLM_FIX,
    ),
    *_rows(
        ("rollout_server_url", "rollout_server_timeout"),
        _BACKEND,
        _other_backend(*SERVERS),
        "{rollout_backend} is no server",
        _SERVER_FIX,
    ),
    Ignored(
        "rollout_sync_folder",
        (*_BACKEND, "train_type", "rollout_lora"),
        lambda c: _other_backend(*SERVERS)(c) and (c.model.train_type == "full" or c.rl.rollout_lora is False),
        "{rollout_backend} is no server, and no adapters go alone",
        f"{_SERVER_FIX}, or --train_type lora",
    ),
    Ignored(
        "rollout_lora",
        ("train_type",),
        lambda c: c.model.train_type == "full",
        "no adapters train",
        "--train_type lora",
    ),
    *_rows(
        ("vllm_gpu_memory_utilization",), _BACKEND, _other_backend("vllm"), "belongs to rollout_backend vllm", _VLLM_FIX
    ),
    *_strict(
        ("importance_sampling_mode", "importance_sampling_clip_max", "importance_sampling_clip_min"),
        _CORRECTION,
        _UNCORRECTED,
        "samples are not weighed",
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

_LEVEL = ("importance_sampling_level", "loss_type")
_ASYNC: Test = lambda c: c.rl.async_generation  # noqa: E731

RL_CLASHES: tuple[Clash, ...] = (
    Clash(_GAE, lambda c: c.task in GRPO and estimator_of(c) == "gae", "needs a critic", "megaswift ppo"),
    Clash(
        _GAE,
        lambda c: c.task in PPO and estimator_of(c) != "gae",
        "leaves the critic of ppo without work",
        "megaswift grpo",
    ),
    Clash(
        ("num_generations", "advantage_estimator"),
        lambda c: c.task in GRPO and generations_of(c) < ALONE and estimator_of(c) != "reinforce_plus_plus",
        "compares the completions of a prompt with each other, and there is one",
        "--num_generations 8",
    ),
    Clash(
        ("generation_batch_size", "steps_per_generation"),
        lambda c: c.rl.generation_batch_size is not None and c.rl.steps_per_generation is not None,
        "is said twice: by generation_batch_size and by steps_per_generation",
        "one of the two",
    ),
    Clash(
        ("max_completion_length", "max_length"),
        _rl(lambda c: c.rl.max_completion_length >= c.data.max_length),
        "leaves a prompt no token of max_length {max_length}",
        "a larger --max_length",
    ),
    Clash(
        ("truncation_strategy",),
        _rl(lambda c: c.data.truncation_strategy in ("right", "split")),
        "would cut the end of a question away",
        "--truncation_strategy delete",
    ),
    Clash(
        ("streaming",),
        _rl(lambda c: c.data.streaming),
        "is not for prompts: they are short, and are tokenised before training",
        "--streaming false",
    ),
    Clash(
        ("reward_weights", "reward_funcs", "reward_model"),
        lambda c: len(c.rl.reward_weights) not in (0, len(c.rl.reward_funcs) + len(c.rl.reward_model)),
        "should be one number for each of reward_funcs and then of reward_model",
        "--reward_weights with as many numbers",
    ),
    Clash(
        ("reward_funcs", "soft_cache_length"),
        lambda c: _overlong(c) and c.rl.soft_cache_length is None,
        "soft_overlong needs to know over how many tokens it falls",
        "--soft_cache_length 128",
    ),
    Clash(
        ("soft_cache_length", "reward_funcs", "soft_max_length", "max_completion_length"),
        _tail_is_all,
        "should be less than soft_max_length, or than max_completion_length where that is unset",
        "--soft_cache_length 128",
    ),
    Clash(
        _LEVEL,
        lambda c: policy_loss_of(c) == "luspo" and c.rl.importance_sampling_level != "sequence",
        "loss_type luspo takes one ratio a completion",
        "--importance_sampling_level sequence",
    ),
    Clash(
        _LEVEL,
        lambda c: policy_loss_of(c) == "vespo" and c.rl.importance_sampling_level != "token",
        "loss_type vespo forms the ratio of a completion itself",
        "--importance_sampling_level token",
    ),
    Clash(
        ("importance_sampling_mode", "loss_type", "importance_sampling_correction", "rollout_backend"),
        lambda c: (
            policy_loss_of(c) == "vespo"
            and corrects_sampler(c)
            and not c.rl.importance_sampling_mode.startswith("token")
        ),
        "loss_type vespo reads weights of tokens",
        "--importance_sampling_mode token_truncate",
    ),
    Clash(
        ("importance_sampling_clip_min", "importance_sampling_clip_max"),
        _bounds_cross,
        "is not below importance_sampling_clip_max {importance_sampling_clip_max}",
        "--importance_sampling_clip_min 0.5",
    ),
    Clash(
        ("importance_sampling_mode", "importance_sampling_clip_min", "importance_sampling_clip_max"),
        _no_bound,
        "needs a bound to cut weights to",
        "--importance_sampling_clip_max 3",
    ),
    Clash(
        ("async_generation", "offload_model", "offload_optimizer", "rollout_sleep"),
        lambda c: _ASYNC(c) and (c.rl.offload_model or c.rl.offload_optimizer or c.rl.rollout_sleep),
        "samples while the model trains, so neither can give its memory to the other",
        "no --offload_model, --offload_optimizer or --rollout_sleep",
    ),
    Clash(
        ("offload_model", "offload_optimizer", "engine"),
        lambda c: c.task in RL and not is_native(c) and (c.rl.offload_model or c.rl.offload_optimizer),
        "is of the native engine; {engine} keeps what it trains where it is",
        "--engine megatron, or --deepspeed zero3_offload",
    ),
    Clash(
        ("train_type", "quantization_bit"),
        _rl(lambda c: not is_native(c) and bits_of(c) is not None and not _is_plain_lora(c)),
        "over weights in few bits cannot be merged for the sampler without rounding them again",
        "--train_type lora, without use_dora",
    ),
    Clash(
        ("adapters",),
        lambda c: c.task in PPO and c.lora.adapters is not None,
        "are a policy's, and the critic of ppo would have none to go on from",
        "them merged into --model, and new ones over it",
    ),
    Clash(
        ("freeze_parameters",),
        lambda c: c.task in PPO and bool(c.model.freeze_parameters),
        "is not for ppo: critic and policy would both be frozen by it",
        "megaswift grpo",
    ),
)


def missing_rewards(c: Sections) -> Iterator[Problem]:
    """A run that nothing judges."""
    if c.task in RL and not c.rl.reward_funcs and not c.rl.reward_model and c.rl.environment is None:
        yield Problem(
            "--reward_funcs",
            "is missing: nothing says which completions are good",
            "--reward_funcs accuracy, --reward_funcs FILE.py:function, or --reward_model DIR",
        )
