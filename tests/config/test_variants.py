"""What options declare in `only_with`: selectors that exist, with values that they can have.

Covers: megaswift/config/variants.py, megaswift/config/derived_rules.py, megaswift/options/option.py. Every option with
every value of every selector is recorded in `tests/net/`.
"""

from __future__ import annotations

import pytest

from megaswift.config import SwiftConfig, load_config
from megaswift.config.sections import OPTIONS
from megaswift.config.variants import FACTS, SELECTORS, variant_note
from megaswift.errors import ConfigError
from megaswift.options.option import at_least, but_not, is_set, one_of

PAIRS = [(name, selector) for name, option in OPTIONS.items() for selector in option.only_with]


@pytest.mark.parametrize("name, selector", PAIRS)
def test_a_selector_exists_and_can_have_the_values(name: str, selector: str) -> None:
    assert selector in FACTS or selector in OPTIONS
    choices = [c for task in ("sft", "dpo", "kto", "cpo", "grpo", "ppo") for c in _choices(selector, task)]
    wanted = OPTIONS[name].only_with[selector]
    if choices:
        assert {v for v in (*wanted.values, *wanted.excluded) if v is not None} <= {*choices}


def _choices(selector: str, task: str) -> tuple[str, ...]:
    return OPTIONS[selector].choices_in(task) if selector in OPTIONS else ()


def test_facts_read_options() -> None:
    assert {name for fact in FACTS.values() for name in fact.reads} <= set(OPTIONS)
    assert len(list(SELECTORS.rules())) == len(PAIRS)


@pytest.mark.parametrize(
    "wanted, good, bad",
    [
        (one_of("a", "b"), ["b", ("x", "a")], ["c", None, ("x", "y")]),
        (one_of(False), [False], [True, None]),
        (but_not("a"), ["b", ("a", "b")], ["a", ("a",)]),
        (at_least(2), [2, 3], [1, None]),
        (is_set(), ["x", 1, (0,)], [None, "", 0, (), False]),
    ],
)
def test_which_values_are_wanted(wanted: object, good: list[object], bad: list[object]) -> None:
    assert all(wanted.holds(value) for value in good)  # type: ignore[attr-defined]
    assert not any(wanted.holds(value) for value in bad)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "words, rule, fix",
    [
        ("--muon_momentum 0.9", "applies only to --optimizer muon (optimizer is adam)", "--optimizer muon"),
        ("--min_lr 1e-6 --lr_scheduler_type constant", "does not apply to --lr_scheduler_type constant", "linear"),
        ("--cp_comm_type all_gather", "applies only to --context_parallel_size 2 or more", "--context_parallel_size 2"),
        ("--early_stopping_threshold 1", "applies only to runs with --early_stopping_patience", "patience EVALUATIONS"),
        ("--wandb_project p --report_to none", "applies only to --report_to wandb", "--report_to wandb"),
        ("--tp 2 --engine ddp", "applies only to --engine megatron (engine is ddp)", "--engine megatron"),
        ("--tp 2 --deepspeed zero2", "applies only to --engine megatron", "--engine megatron without --deepspeed"),
        ("--init_r 4", "applies only to --train_type adalora (train_type is full)", "--train_type adalora"),
    ],
)
def test_the_wording(words: str, rule: str, fix: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config("sft", words.split(), environ={})
    (problem,) = error.value.problems
    assert problem.rule.startswith(f"would be ignored: {rule}")
    assert fix in problem.fix and problem.fix.endswith(", or leave it out")


def test_help_names_the_losses_of_an_option() -> None:
    known = {"loss_type": ("a", "clip_cov", "kl_cov")}
    assert variant_note(OPTIONS["clip_cov_lb"], known) == "loss_type clip_cov"
    assert variant_note(OPTIONS["learning_rate"], known) == ""


def test_options_of_a_variant_are_accepted_with_it() -> None:
    assert SwiftConfig(optimizer="muon", engine="ddp", muon_momentum=0.9).optim.muon_momentum == 0.9
