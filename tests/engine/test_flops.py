"""The FLOP rule against counting matrix products one by one, and the table of peaks."""

from __future__ import annotations

import json

import pytest

from megaswift.config import load_config
from megaswift.engine.flops import peak_tflops
from megaswift.families import family_of
from megaswift.models.flops import StepFlopFormula, mixer_flop_sizes
from megaswift.models.spec import ModelSpec
from megaswift.run.build import forward_pass_count_before_step
from tests.parity.models import config


def spec_of(variant: str) -> ModelSpec:
    """The description of a tiny model."""
    given = json.loads(config(variant).to_json_string(use_diff=False))
    return family_of(given).spec(given)


def test_the_rule_equals_counting_the_products_of_a_small_transformer() -> None:
    layers, hidden, heads, head_dim, kv_heads, ffn, vocabulary, length = 2, 64, 4, 16, 2, 96, 130, 10
    weights = (
        layers * (hidden * heads * head_dim * 2 + hidden * kv_heads * head_dim * 2 + 3 * hidden * ffn)
        + hidden * vocabulary
    )
    products = 2 * weights * length  # each token meets each weight: one multiplication, one addition
    pairs = length * length / 2  # causal
    attention = layers * heads * 2 * (2 * pairs * head_dim)  # queries x keys, weights x values
    forward = products + attention
    rule = StepFlopFormula(parameters=weights, attention=layers * heads * head_dim)
    assert rule.step(length, length * length) == pytest.approx(3 * forward)


def test_gated_delta_nets_count_their_states_by_hand() -> None:
    """Three of four layers: for each token and each of 8 value heads a product of [1, 8] and [8, 12] at the key, an
    outer product of 8 and 12, and a product of [1, 8] and [8, 12] at the query; one layer of 8 heads of 16 attends."""
    spec = spec_of("qwen3_5")
    attention, state = mixer_flop_sizes(spec)
    assert attention == 8 * 16 and 2 * state == 3 * 8 * (2 * 8 * 12 + 2 * 8 * 12 + 2 * 8 * 12)
    rule = StepFlopFormula(parameters=7, attention=attention, passes=1, forward=9, state=state)
    forward_of_mixers = 2 * state * 10 + 2 * attention * 100
    assert rule.step(10, 100) == 6 * 7 * 10 + 3 * forward_of_mixers + 2 * 9 * 10 + forward_of_mixers
    assert mixer_flop_sizes(spec_of("dense")) == (4 * 8 * 16, 0)


@pytest.mark.parametrize(
    ("words", "passes"),
    [
        ("sft", 0),
        ("dpo", 1),
        ("dpo --precompute_ref_log_probs true", 0),
        ("dpo --reference_free true", 0),
        ("orpo", 0),
        ("rm", 0),
        ("kto --micro_batch_size 2", 3),
        ("kto --loss_type bco", 2),
        ("kto --loss_type bco --precompute_ref_log_probs true", 1),
        ("kto --loss_type apo_zero_unpaired", 1),
        *(
            (f"grpo --reward_funcs format --global_batch_size 8 {more}", passes)
            for more, passes in (
                ("", 0),
                ("--beta 0.1", 1),
                ("--generation_batch_size 16", 1),
                ("--generation_batch_size 16 --beta 0.1", 2),
                ("--num_iterations 4 --beta 0.1", 0.5),
                ("--num_iterations 4 --beta 0.1 --top_entropy_quantile 0.5", 1.5),
                ("--num_iterations 4 --beta 0.1 --use_rollout_logprobs", 0.25),
                ("--loss_type clip_cov", 1),
            )
        ),
        ("ppo --reward_funcs format", 2),
        ("ppo --reward_funcs format --beta 0", 0),
    ],
)
def test_a_reference_s_pass_is_a_third_of_a_step(words: str, passes: float) -> None:
    """By hand: 10 tokens, 7 parameters of which 3 are frozen, squares 100, 5 of attention: 6 x (4 + 2/3 x 3) x 10 + 6 x
    5 x 100 = 3360 of training, 2 x 7 x 10 + 2 x 5 x 100 = 1140 of each further pass."""
    task, *options = words.split()
    counted = forward_pass_count_before_step(load_config(task, options, environ={}))
    assert counted == passes
    assert StepFlopFormula(parameters=6, attention=5, passes=counted, forward=7).step(10, 100) == 3360 + 1140 * passes


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B200", 2250.0),
        ("CPU", None),
        ("GeForce GTX 1080", None),
    ],
)
def test_peaks_are_those_of_the_right_device(name: str, peak: float | None) -> None:
    assert peak_tflops(name, "bfloat16") == peak


def test_float32_has_no_stated_peak() -> None:
    assert peak_tflops("NVIDIA H200", "float32") is None
