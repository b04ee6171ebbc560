"""Options of preference learning: each row of the rules fires when it should and is silent when its condition is met;
what tasks take.

Covers: megaswift/losses/options/preference.py.
"""

from __future__ import annotations

import pytest

from megaswift.config import load_config
from megaswift.losses import cpo, dpo_loss_types, kto, orpo, reward
from megaswift.losses.options.loss_table import ALPHAPO, loss_names
from megaswift.losses.options.preference import beta_of, cpo_alpha_of, loss_types_of, needs_reference
from megaswift.losses.options.preference_checks import PREFERENCE_CLASHES
from tests.config.refusals import assert_contradiction, assert_idle, problems

IDLE = [
    ("dpo --ref_model r --reference_free", "dpo --ref_model r"),
    ("dpo --offload_reference --reference_free", "dpo --offload_reference"),
    ("dpo --sync_ref_model --reference_free", "dpo --sync_ref_model"),
    ("dpo --precompute_ref_log_probs --reference_free", "dpo --precompute_ref_log_probs --ref_model r"),
    (
        "dpo --offload_reference --precompute_ref_log_probs",
        "kto --precompute_ref_log_probs --loss_type bco --micro_batch_size 2",
    ),
    ("dpo --ref_model_mixup_alpha 0.5", "dpo --ref_model_mixup_alpha 0.5 --sync_ref_model"),
    (
        "kto --ref_model_sync_steps 5 --micro_batch_size 2",
        "kto --ref_model_sync_steps 5 --sync_ref_model --micro_batch_size 2",
    ),
    ("dpo --offload_reference --train_type lora", "dpo --offload_reference --train_type lora --adapters a"),
    ("dpo --discopop_tau 0.1", "dpo --discopop_tau 0.1 --loss_type discopop"),
    ("dpo --f_alpha_divergence_coef 0.3", "dpo --f_alpha_divergence_coef 0.3 --f_divergence_type alpha_divergence"),
    (
        "dpo --f_divergence_type forward_kl --loss_type nca_pair",
        "dpo --f_divergence_type forward_kl --loss_type nca_pair ipo",
    ),
    ("dpo --label_smoothing 0.1 --loss_type hinge", "dpo --label_smoothing 0.1"),
    ("cpo --cpo_alpha 0.5 --loss_type alphapo", "cpo --cpo_alpha 0.5 --loss_type simpo"),
    ("cpo --simpo_gamma 0.5", "cpo --simpo_gamma 0.5 --loss_type simpo"),
]
IDLE_PULL = [("ref_model", "r"), ("offload_reference", "true"), ("sync_ref_model", "true")]
ON_A_DRIVE = '{"zero_optimization":{"stage":3,"offload_param":{"device":"nvme","nvme_path":"n"}}}'
CLASHING = [
    ("beta", "dpo --beta 0"),
    ("beta", "gkd --beta 1.5 --teacher_model t"),
    ("loss_type", "dpo --loss_type kto"),
    ("loss_type", "cpo --loss_type hinge ipo"),
    ("loss_weights", "dpo --loss_weights 1 2"),
    ("label_smoothing", "dpo --loss_type exo_pair"),
    ("label_smoothing", "dpo --loss_type robust --label_smoothing 0.5"),
    ("use_weighting", "dpo --use_weighting --loss_type aot"),
    ("ref_model", "dpo --ref_model r --train_type lora"),
    ("sync_ref_model", "dpo --sync_ref_model --train_type lora"),
    ("precompute_ref_log_probs", "dpo --precompute_ref_log_probs --sync_ref_model"),
    ("precompute_ref_log_probs", "dpo --precompute_ref_log_probs --streaming --max_steps 3"),
    ("precompute_ref_log_probs", "kto --precompute_ref_log_probs --micro_batch_size 2"),
    ("deepspeed", f"dpo --deepspeed {ON_A_DRIVE}"),
    ("random_init", "dpo --random_init"),
]


@pytest.mark.parametrize("given, counts", IDLE)
def test_an_option_that_would_be_ignored(given: str, counts: str) -> None:
    assert_idle(given, counts)


@pytest.mark.parametrize("name, words", CLASHING)
def test_a_contradiction(name: str, words: str) -> None:
    assert_contradiction(name, words)


@pytest.mark.parametrize("name, value", IDLE_PULL)
def test_no_reference_without_a_pull_to_it(name: str, value: str) -> None:
    assert "beta is 0, so there is neither" in problems(f"grpo --{name} {value}")[0]
    assert problems(f"grpo --beta 0.1 --{name} {value}") == problems(f"ppo --{name} {value}") == []


def test_every_row_is_tried() -> None:
    assert [name for name, _ in CLASHING] == [r.options[0] for r in PREFERENCE_CLASHES]


def test_each_loss_of_the_table_has_its_formula() -> None:
    assert {*loss_names("dpo")} == {*dpo_loss_types.LOSS_TYPES, dpo_loss_types.SFT}
    assert {*loss_names("orpo")} == {*orpo.LOSS_TYPES} and {*loss_names("rm")} == {*reward.LOSS_TYPES}
    assert {*loss_names("kto")} == {*kto.LOSS_TYPES} and {*loss_names("cpo")} == {*cpo.LOSS_TYPES, ALPHAPO}


@pytest.mark.parametrize(
    "task, beta, types, likelihood, reference",
    [
        ("dpo", 0.1, ("sigmoid",), 0.0, True),
        ("kto", 0.1, ("kto",), 0.0, True),
        ("cpo", 0.1, ("sigmoid",), 1.0, False),
        ("simpo", 2.0, ("simpo",), 0.0, False),
        ("orpo", 0.1, ("odds_ratio",), 0.0, False),
        ("rm", 0.1, ("bradley_terry",), 0.0, False),
    ],
)
def test_defaults_of_a_task(task: str, beta: float, types: tuple[str, ...], likelihood: float, reference: bool) -> None:
    cfg = load_config(task, ["--micro_batch_size", "2"], environ={})
    assert (beta_of(cfg), loss_types_of(cfg), needs_reference(cfg)) == (beta, types, reference)
    assert task not in ("cpo", "simpo") or cpo_alpha_of(cfg) == likelihood
    assert cfg.data.packing is True


def test_names_and_numbers_as_users_write_them() -> None:
    cfg = load_config(
        "dpo", ["--loss_type", "sigmoid,aot_pair", "--loss_weights", "1,0.5", "--rlhf_type", "dpo"], environ={}
    )
    assert cfg.preference.loss_type == ("sigmoid", "aot_unpaired") and cfg.preference.loss_weights == (1.0, 0.5)
    assert load_config(None, ["--train_type", "dpo"], environ={}).task == "dpo"
