"""KTO's global batch: one row is refused, whatever it results from; and which phases pair over the global batch."""

from __future__ import annotations

import pytest

from megaswift.config import SwiftConfig, load_config
from megaswift.losses.options.kto_pairs import kto_batch_problems, kto_pairs_over_global_batch


def config(text: str) -> SwiftConfig:
    task, *words = text.split()
    return load_config(task, words, environ={})


@pytest.mark.parametrize(
    ("words", "dp", "refused"),
    [
        ("kto", 1, True),
        ("kto --global_batch_size 1", 1, True),
        ("kto", 2, False),
        ("kto --gradient_accumulation_steps 2", 1, False),
        ("kto --global_batch_size 2", 1, False),
        ("kto --micro_batch_size 2", 1, False),
        ("kto --loss_type bco", 1, False),
        ("kto --loss_type apo_zero_unpaired", 1, False),
        ("dpo", 1, False),
        ("kto", None, False),
    ],
)
def test_a_global_batch_of_one_row_is_refused(words: str, dp: int | None, refused: bool) -> None:
    problems = kto_batch_problems(config(words), dp)
    assert [p.what for p in problems] == ["a global batch of 1 row"] * refused


def test_each_phase_by_its_own_rows() -> None:
    cfg = config("kto --micro_batch_size 2 --per_device_eval_batch_size 1 --split_dataset_ratio 0.1")
    assert not kto_pairs_over_global_batch(cfg) and kto_pairs_over_global_batch(cfg, training=False)
    cfg = config("kto --micro_batch_size 1 --per_device_eval_batch_size 4 --split_dataset_ratio 0.1")
    assert kto_pairs_over_global_batch(cfg) and not kto_pairs_over_global_batch(cfg, training=False)
