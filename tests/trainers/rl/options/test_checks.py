"""Options of reinforcement learning: each row of the rules fires when it should, and is silent when its condition is
met.

Covers: megaswift/trainers/rl/options/checks.py, megaswift/trainers/rl/options/derived.py,
megaswift/compat/swift_rollout.py.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from megaswift.config import SwiftConfig, load_config
from megaswift.config.help import task_help
from megaswift.config.sections import OPTIONS
from megaswift.config.variants import values_with
from megaswift.errors import ConfigError
from megaswift.losses.options.loss_table import loss_names
from megaswift.losses.options.preference import beta_of, needs_reference
from megaswift.rollout.options.rollout import BACKENDS
from megaswift.trainers.rl.options.checks import RL_CLASHES
from megaswift.trainers.rl.options.derived import (
    advantage_estimator_of,
    corrects_sampler_mismatch,
    generations_per_prompt_of,
    kl_estimator_of,
    kl_in_reward_of,
    policy_loss_of,
    weighs_kl_by_ratio,
    whitens_advantages,
)
from megaswift.trainers.rl.options.rl import MODES
from tests.config.refusals import assert_contradiction, assert_idle, problems

SERVER = "--rollout_backend vllm_server"
IDLE = [
    ("--epsilon 0.3 --loss_type sapo", "--epsilon 0.3"),
    ("--epsilon 0.3 --loss_type cispo", "--epsilon 0.3"),
    ("--epsilon_high 0.3 --loss_type sapo", "--epsilon_high 5 --loss_type cispo"),
    ("--delta 4 --loss_type vespo", "--delta 4 --loss_type bnpo"),
    ("--sapo_temperature_pos 2", "--sapo_temperature_pos 2 --loss_type sapo"),
    ("--sapo_temperature_neg 2", "--sapo_temperature_neg 2 --loss_type sapo"),
    ("--vespo_k_pos 0", "--vespo_k_pos 0 --loss_type vespo"),
    ("--clip_cov_ratio 0.1", "--clip_cov_ratio 0.1 --loss_type clip_cov"),
    ("--clip_cov_lb 0.5", "--clip_cov_lb 0.5 --loss_type clip_cov"),
    ("--clip_cov_ub 9", "--clip_cov_ub 9 --loss_type clip_cov"),
    ("--kl_cov_ratio 0.1", "--kl_cov_ratio 0.1 --loss_type kl_cov"),
    ("--kl_cov_coef 0.5", "--kl_cov_coef 0.5 --loss_type kl_cov"),
    ("--pass_at_k 2", "--pass_at_k 2 --advantage_estimator pass_at_k"),
    ("--vespo_lambda_pos 1", "--vespo_lambda_pos 1 --loss_type vespo"),
    ("--vespo_k_neg 1", "--vespo_k_neg 1 --loss_type vespo"),
    ("--vespo_lambda_neg 1", "--vespo_lambda_neg 1 --loss_type vespo"),
    ("--scale_rewards batch --advantage_estimator rloo", "--scale_rewards batch"),
    (
        "--multi_objective_aggregation normalize_then_sum --advantage_estimator rloo",
        "--multi_objective_aggregation normalize_then_sum",
    ),
    ("--kl_in_reward true", "--kl_in_reward true --beta 0.1"),
    ("--kl_controller adaptive --beta 0.1", "--kl_controller adaptive --beta 0.1 --kl_in_reward true"),
    ("--kl_estimator k2", "--kl_estimator k2 --beta 0.1"),
    ("--use_bias_correction_kl true", "--use_bias_correction_kl true --beta 0.1"),
    ("--target_kl 3 --beta 0.1", "--target_kl 3 --kl_controller adaptive --beta 0.1 --kl_in_reward true"),
    ("--kl_horizon 3 --beta 0.1", "--kl_horizon 3 --kl_controller adaptive --beta 0.1 --kl_in_reward true"),
    ("--gamma 0.9", "--gamma 0.9 --advantage_estimator reinforce_plus_plus"),
    (
        "--scale_rewards none --multi_objective_aggregation normalize_then_sum",
        "--scale_rewards none --multi_objective_aggregation sum_then_normalize",
    ),
    ("--allow_biased_sampling true", "--allow_biased_sampling true --top_k 20"),
    ("--importance_sampling_filter_max 2", "--importance_sampling_filter_max 2 --use_vllm"),
    ("--importance_sampling_filter_min 0.5", "--importance_sampling_filter_min 0.5 --async_generation"),
    ("--code_timeout 2", "--code_timeout 2 --reward_funcs code"),
    ("--code_memory 99", "--code_memory 99 --reward_funcs code"),
    ("--allow_unsafe_code", "--allow_unsafe_code --reward_funcs code"),
    ("--whiten_advantages true", "--normalize_advantages true --advantage_estimator rloo"),
    ("--importance_sampling_level sequence --loss_type rloo", "--importance_sampling_level sequence --loss_type grpo"),
    ("--max_resample_times 2", "--max_resample_times 2 --dynamic_sample"),
    ("--max_turns 2", "--max_turns 2 --environment e.py:Game"),
    ("--soft_max_length 200", "--soft_max_length 200 --soft_cache_length 20 --reward_funcs soft_overlong"),
    ("--soft_cache_length 20", "--soft_cache_length 20 --reward_funcs get_soft_overlong_punishment"),
    ("--cosine_min_len_value_wrong 0", "--cosine_min_len_value_wrong 0 --reward_funcs cosine"),
    ("--cosine_max_len_value_wrong 1", "--cosine_max_len_value_wrong 1 --reward_funcs cosine"),
    ("--cosine_min_len_value_correct 0", "--cosine_min_len_value_correct 0 --reward_funcs cosine"),
    ("--cosine_max_len_value_correct 1", "--cosine_max_len_value_correct 1 --reward_funcs cosine"),
    ("--cosine_max_len 100", "--cosine_max_len 100 --reward_funcs format cosine"),
    ("--repetition_n_grams 2", "--repetition_n_grams 2 --reward_funcs repetition"),
    ("--repetition_max_penalty 0", "--repetition_max_penalty 0 --reward_funcs repetition"),
    (f"--rollout_sleep true {SERVER}", "--rollout_sleep true"),
    ("--rollout_server_url http://h:1", "--rollout_server_url http://h:1 --rollout_backend sglang"),
    ("--rollout_server_timeout 1", f"--rollout_server_timeout 1 {SERVER}"),
    ("--rollout_sync_folder d", f"--rollout_sync_folder d {SERVER}"),
    ("--rollout_weight_transport gloo", f"--rollout_weight_transport gloo {SERVER}"),
    ("--rollout_changed_weights_only true --use_vllm", f"--rollout_changed_weights_only true {SERVER}"),
    ("--vllm_tensor_parallel_size 2", "--vllm_tensor_parallel_size 2 --use_vllm"),
    ("--environment_placement cpu", "--environment_placement cpu --environment e.py:E"),
    (
        "--environment_workers 2 --environment e.py:E",
        "--environment_workers 2 --environment e.py:E --environment_placement cpu",
    ),
    ("--cpus_per_engine 2", "--cpus_per_engine 2 --sampler_engines 2"),
    ("--ray_address h:1", "--ray_address h:1 --sampler_engines 2"),
    ("--rollout_sync_folder d", "--rollout_sync_folder d --sampler_engines 2"),
    ("--rollout_lora true", "--vllm_enable_lora true --train_type lora"),
    ("--vllm_gpu_memory_utilization 0.5", "--vllm_gpu_memory_utilization 0.5 --use_vllm"),
    ("--vllm_enforce_eager true", "--vllm_enforce_eager true --use_vllm"),
    ("--vllm_seed_requests false", f"--vllm_seed_requests false {SERVER}"),
    ("--vllm_enable_prefix_caching false", "--vllm_enable_prefix_caching false --use_vllm"),
    (f"--vllm_disable_cascade_attn true {SERVER}", "--vllm_disable_cascade_attn true --use_vllm"),
    ('--vllm_limit_mm_per_prompt {"image":2}', '--vllm_limit_mm_per_prompt {"image":2} --use_vllm'),
    ("--vllm_mm_processor_cache_gb 0", "--vllm_mm_processor_cache_gb 0 --use_vllm"),
    ('--vllm_engine_kwargs {"block_size":16}', '--vllm_engine_kwargs {"block_size":16} --use_vllm'),
    ("--importance_sampling_mode token_mask", "--importance_sampling_mode token_mask --use_vllm"),
    ("--importance_sampling_clip_max 2", "--importance_sampling_clip_max 2 --importance_sampling_correction"),
    ("--importance_sampling_clip_min 0", "--importance_sampling_clip_min 0 --use_vllm"),
    ("--num_completions_to_print 3 --log_completions false", "--num_completions_to_print 3"),
]
CLASHING = [
    ("advantage_estimator", "--advantage_estimator gae"),
    ("advantage_estimator", "ppo --advantage_estimator rloo"),
    ("num_generations", "--num_generations 1"),
    ("pass_at_k", "--pass_at_k 9 --advantage_estimator pass_at_k"),
    ("advantage_estimator", "--advantage_estimator pass_at_k --kl_in_reward true --beta 0.1"),
    ("importance_sampling_correction", "--importance_sampling_correction --use_rollout_logprobs"),
    ("clip_cov_lb", "--loss_type clip_cov --clip_cov_lb 6"),
    ("generation_batch_size", "--generation_batch_size 8 --steps_per_generation 2"),
    ("max_completion_length", "--max_length 512"),
    ("truncation_strategy", "--truncation_strategy right"),
    ("streaming", "--streaming --max_steps 3"),
    ("reward_weights", "--reward_weights 1 2 --reward_funcs format"),
    ("reward_funcs", "--reward_funcs soft_overlong"),
    ("soft_cache_length", "--soft_cache_length 512 --reward_funcs soft_overlong"),
    ("top_p", "--top_p 0.9"),
    ("top_k", "--top_k 50"),
    ("min_p", "ppo --min_p 0.1"),
    ("repetition_penalty", "--repetition_penalty 1.05"),
    ("dynamic_sample", "--dynamic_sample --num_generations 1 --advantage_estimator reinforce_plus_plus"),
    (
        "multi_objective_aggregation",
        "--multi_objective_aggregation normalize_then_sum --kl_in_reward true --beta 0.5",
    ),
    ("use_bias_correction_kl", "--kl_estimator k1 --beta 0.1 --use_bias_correction_kl false"),
    ("use_bias_correction_kl", "--kl_estimator k2 --beta 0.1 --use_bias_correction_kl true"),
    ("epsilon_high", "--loss_type cispo --epsilon_high 0.28"),
    ("importance_sampling_level", "--loss_type luspo"),
    ("importance_sampling_level", "--loss_type vespo --importance_sampling_level sequence"),
    ("loss_agg_mode", "--loss_type rloo --loss_agg_mode token-mean"),
    ("loss_type", "--loss_type rloo --advantage_estimator reinforce_plus_plus"),
    (
        "importance_sampling_level",
        "--importance_sampling_level sequence --advantage_estimator reinforce_plus_plus",
    ),
    ("importance_sampling_mode", "--loss_type vespo --use_vllm --importance_sampling_mode geometric_mask"),
    ("importance_sampling_clip_min", "--use_vllm --importance_sampling_clip_min 3"),
    (
        "importance_sampling_filter_min",
        "--use_vllm --importance_sampling_filter_min 3 --importance_sampling_filter_max 2",
    ),
    (
        "importance_sampling_mode",
        "--use_vllm --importance_sampling_clip_max none --importance_sampling_mode token_truncate",
    ),
    ("async_generation", "--async_generation --offload_model"),
    ("async_generation", "--async_generation --max_staleness 2"),
    ("staleness_strategy", f"--staleness_strategy drop {SERVER}"),
    ("staleness_strategy", f"--staleness_strategy drop --max_staleness 8 --environment e.py:E {SERVER}"),
    ("partial_rollouts", "--partial_rollouts"),
    ("partial_rollouts", "--partial_rollouts --max_staleness 2 --environment e.py:E"),
    ("save_rollouts", "--save_rollouts d --replay_rollouts d"),
    ("save_rollouts", "--save_rollouts out/checkpoints/rollouts --output_dir out/"),
    ("replay_rollouts", "--replay_rollouts d --val_dataset v.jsonl"),
    ("vllm_tensor_parallel_size", "--use_vllm --vllm_tensor_parallel_size 2 --max_staleness 1"),
    ("sampler_engines", "--sampler_engines 2 --rollout_backend vllm_server"),
    ("sampler_engines", "--sampler_engines 2 --rollout_backend sglang --rollout_server_url http://h:1"),
    ("sampler_engines", "--sampler_engines 2 --rollout_sleep true"),
    ("sampler_engines", "--sampler_engines 2 --replay_rollouts d"),
    ("train_type", "--engine ddp --train_type boft --quantization_bit 4"),
    ("adapters", "ppo --train_type lora --adapters d"),
    ("freeze_parameters", "ppo --freeze_parameters norm"),
]


@pytest.mark.parametrize("given, counts", IDLE)
def test_an_option_that_would_be_ignored(given: str, counts: str) -> None:
    assert_idle(given, counts, "grpo")


@pytest.mark.parametrize("name, words", CLASHING)
def test_a_contradiction(name: str, words: str) -> None:
    assert_contradiction(name, words, "grpo")


def test_every_row_is_tried() -> None:
    assert [name for name, _ in CLASHING] == [r.options[0] for r in RL_CLASHES]


def test_one_mistake_of_another_task_is_told_once() -> None:
    assert len(problems("dpo --sapo_temperature_pos 2")) == len(problems("sft --vllm_gpu_memory_utilization 0.5")) == 1


def settled(task: str, **options: object) -> tuple[object, ...]:
    c = SwiftConfig(task=task, **options)
    return (
        generations_per_prompt_of(c),
        advantage_estimator_of(c),
        policy_loss_of(c),
        beta_of(c),
        needs_reference(c),
        kl_in_reward_of(c),
        kl_estimator_of(c),
        whitens_advantages(c),
        corrects_sampler_mismatch(c),
        weighs_kl_by_ratio(c),
    )


@pytest.mark.parametrize(
    "task, options, expected",
    [
        ("grpo", {}, (8, "grpo", "dapo", 0.0, False, False, "k3", False, False, True)),
        ("ppo", {}, (1, "gae", "bnpo", 0.05, True, True, "k1", True, False, True)),
        (
            "grpo",
            {"beta": 0.1, "loss_type": "cispo", "use_vllm": True},
            (8, "grpo", "cispo", 0.1, True, False, "k3", False, True, True),
        ),
        (
            "grpo",
            {"kl_coef": 0.1, "advantage_estimator": "rloo"},
            (8, "rloo", "rloo", 0.1, True, True, "k1", False, False, True),
        ),
        (
            "grpo",
            {
                "beta": 0.1,
                "advantage_estimator": "rloo",
                "kl_in_reward": False,
                "loss_type": "dapo",
                "kl_estimator": "k2",
                "normalize_advantages": True,
            },
            (8, "rloo", "dapo", 0.1, True, False, "k2", True, False, False),
        ),
        (
            "ppo",
            {"beta": 0, "importance_sampling_correction": True, "whiten_advantages": False},
            (1, "gae", "bnpo", 0.0, False, False, "k3", False, True, True),
        ),
    ],
)
def test_defaults_of_a_task(task: str, options: dict[str, object], expected: tuple[object, ...]) -> None:
    assert settled(task, **options) == expected


@pytest.mark.parametrize(
    "words, backend",
    [
        ("--use_vllm", "vllm"),
        ("--use_vllm true", "vllm"),
        ("--use_vllm false", "transformers"),
        ("--vllm_mode colocate", "vllm"),
        ("--use_vllm true --vllm_mode colocate", "vllm"),
        ("--vllm_mode colocate --use_vllm false", "transformers"),
        ("--use_vllm false --vllm_mode server", "transformers"),
        ("--use_vllm --vllm_mode server --vllm_server_base_url http://h:1 http://h:2", "vllm_server"),
        ("--vllm_mode server --use_vllm yes --vllm_server_base_url http://h:1 http://h:2", "vllm_server"),
    ],
)
def test_the_two_words_for_vllm(words: str, backend: str) -> None:
    assert load_config("grpo", words.split(), environ={}).rollout.rollout_backend == backend


@pytest.mark.parametrize("words", ["--rlhf_type grpo", "--train_type ppo", "--task grpo"])
def test_a_task_by_any_of_its_words(words: str) -> None:
    cfg = load_config(None, words.split(), environ={})
    assert cfg.task == words.split()[1] and cfg.data.packing is True and cfg.model.train_type == "full"


@pytest.mark.parametrize("task", ["grpo", "ppo"])
@pytest.mark.parametrize("backend", ["transformers", "vllm"])
def test_samples_of_earlier_weights_are_weighed_with_every_sampler(task: str, backend: str) -> None:
    made = SwiftConfig(task=task, max_staleness=3, rollout_backend=backend)
    assert corrects_sampler_mismatch(made)
    assert corrects_sampler_mismatch(made.replace(max_staleness=0, async_generation=True))
    assert not corrects_sampler_mismatch(made.replace(importance_sampling_correction=False))


@pytest.mark.parametrize(
    "words, expected",
    [
        ("token_truncate", ("token_truncate", 2.0, None)),
        ("token_mask", ("token_mask", 2.0, None)),
        ("sequence_truncate", ("geometric_truncate", 2.0, None)),
        ("sequence_mask", ("token_truncate", None, 2.0)),
        ("sequence_mask --rollout_importance_sampling_threshold 5", ("token_truncate", None, 5.0)),
        ("token_mask --rollout_importance_sampling_threshold 5", ("token_mask", 5.0, None)),
        ("none", ("token_truncate", 3.0, None)),
    ],
)
def test_modes_of_ms_swift_mean_what_they_mean_there(words: str, expected: tuple[object, ...]) -> None:
    line = f"--use_vllm --rollout_importance_sampling_mode {words}"
    rl = load_config("grpo", line.split(), environ={}).rl
    found = (rl.importance_sampling_mode, rl.importance_sampling_clip_max, rl.importance_sampling_filter_max)
    assert found == expected


def test_modes_of_ms_swift_from_several_sources(tmp_path: Path) -> None:
    """The threshold of the command line is the one of the file's mode; a wrong mode is named as it was typed."""
    (tmp_path / "run.yaml").write_text("use_vllm: true\nrollout_importance_sampling_mode: sequence_mask\n")
    rl = load_config(
        "grpo", [str(tmp_path / "run.yaml"), "--rollout_importance_sampling_threshold", "4"], environ={}
    ).rl
    assert (rl.importance_sampling_mode, rl.importance_sampling_clip_max) == ("token_truncate", None)
    assert rl.importance_sampling_filter_max == 4.0
    (wrong,) = problems("--use_vllm --rollout_importance_sampling_mode icepop", "grpo")
    assert wrong.startswith("--rollout_importance_sampling_mode icepop: must be one of") and MODES[0] in wrong
    (idle,) = problems("--rollout_importance_sampling_mode token_mask", "grpo")
    assert idle.startswith("--rollout_importance_sampling_mode token_mask: would be ignored")


@pytest.mark.parametrize("mode", MODES[:4])
def test_modes_of_trl_keep_their_meaning(mode: str) -> None:
    """Names and meaning; `Correction` has TRL's values of them (tests/losses/test_sampler_correction.py)."""
    assert (
        load_config("grpo", f"--use_vllm --vllm_importance_sampling_mode {mode}".split(), environ={}).value(
            "importance_sampling_mode"
        )
        == mode
    )


def test_a_loss_of_another_task_is_not_proposed() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("grpo", ["--loss_type", "gpg"], environ={})
    text = str(caught.value)
    assert f"must be one of {' | '.join(loss_names('grpo'))}" in text and "sigmoid" not in text


def test_two_backends_are_a_contradiction() -> None:
    assert (
        "conflicts with" in problems("--use_vllm --rollout_backend sglang --rollout_server_url http://h:1", "grpo")[0]
    )


def test_a_whole_run_needs_something_that_judges() -> None:
    line = ["--model", "m", "--dataset", "d.jsonl"]
    with pytest.raises(ConfigError, match="--reward_funcs: is missing"):
        load_config("grpo", line, complete=True, environ={})
    for judge in ("--reward_funcs format", "--reward_model r", "--environment e.py:Game"):
        assert load_config("ppo", [*line, *judge.split()], complete=True, environ={}).task == "ppo"


def test_the_rules_know_the_losses_samplers_and_rewards_that_there_are() -> None:
    from megaswift.losses.policy_loss_types import LOSS_TYPES
    from megaswift.rewards.scoring import BuiltInRewardParameters
    from megaswift.rollout.sampler import sampler_backend_names

    assert set(loss_names("grpo")) == set(LOSS_TYPES)
    assert {n for n, t in LOSS_TYPES.items() if t.clips} == set(values_with("delta", "loss_type"))
    assert set(sampler_backend_names()) <= set(BACKENDS)
    assert all(f.default in (MISSING, OPTIONS[f.name].default) for f in fields(BuiltInRewardParameters))


def test_what_is_left_out_of_other_tasks() -> None:
    sft = SwiftConfig(task="sft").to_dict()
    assert not any(sft[section] for section in ("rl", "rollout", "rewards", "critic"))
    kept = SwiftConfig(task="grpo", loss_type="sapo").to_dict()
    assert kept["rl"]["sapo_temperature_neg"] == 1.05 and "vespo_k_pos" not in kept["rl"]
    assert "vf_coef" not in kept["critic"] and "code_timeout" not in kept["rewards"]


def test_help_names_the_losses_of_the_task() -> None:
    pages = {task: " ".join(task_help(task, "all", 120).split()) for task in ("grpo", "ppo", "dpo")}
    assert (
        f"[{' | '.join(loss_names('grpo'))}]" in pages["grpo"]
        and "| aot |" not in pages["grpo"]
        and "dr_grpo" not in pages["dpo"]
    )
    assert "--vf_coef 0.1" in pages["ppo"] and "--vf_coef" not in pages["grpo"] and "--loss_type" not in pages["ppo"]
