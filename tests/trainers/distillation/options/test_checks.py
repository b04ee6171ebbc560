"""Rules for options of distillation that follow from whether steps sample."""

from __future__ import annotations

import pytest

from megaswift.config import load_config
from megaswift.errors import ConfigError
from megaswift.trainers.distillation.options.checks import SAMPLING
from tests.config.refusals import assert_idle


def test_the_options_of_sampling() -> None:
    assert {"rollout_backend", "top_k", "max_completion_length", "vllm_enforce_eager"} <= {*SAMPLING}
    assert not {"temperature", "environment", "async_generation"} & {*SAMPLING}


def test_a_teacher_in_place_of_rewards() -> None:
    ours = "--advantage_estimator grpo --reward_funcs accuracy"
    assert_idle(f"--teacher_model t {ours}", "--teacher_model t", task="grpo")
    assert_idle("--reward_funcs accuracy --teacher_model t", "--reward_funcs accuracy", task="grpo")


@pytest.mark.parametrize("option", ["--top_k 5", "--max_completion_length 9", "--rollout_backend vllm"])
def test_nothing_samples_with_rows_alone(option: str) -> None:
    teacher = "--teacher_model t"
    assert_idle(f"{option} {teacher} --lmbda 0", f"{option} {teacher} --lmbda 0.1", task="gkd")
    assert_idle(f"{option} {teacher} --lmbda 0", f"{option} {teacher} --lmbda 0 --seq_kd", task="gkd")


@pytest.mark.parametrize(
    "option",
    ["--async_generation true", "--num_generations 4", "--reward_funcs format", "--ref_model m", "--teacher_tp 2"],
)
def test_options_without_effect_are_refused(option: str) -> None:
    """Reinforcement learning's, a reference's, and those of a teacher that is not in these processes."""
    server = "--teacher_model_server http://h:1 --gkd_logits_topk 4"
    words = f"{option} {server} --engine megatron".split()
    with pytest.raises(ConfigError, match=f"{words[0]} .*(has no effect|would be ignored)"):
        load_config("gkd", ["--model", "m", "--dataset", "d.jsonl", *words], environ={})
