"""Whose completions a step trains on, and the prompts of rows."""

from __future__ import annotations

from collections import Counter

import torch

from megaswift.losses.contract import Batch
from megaswift.trainers.distillation.on_policy import ROWS, STUDENT, TEACHER, last_prompts, writer_of_step


def test_lots_follow_lmbda() -> None:
    drawn = Counter(writer_of_step(1, step, 0.3, False) for step in range(2000))
    assert set(drawn) == {STUDENT, ROWS} and 540 < drawn[STUDENT] < 660
    assert {writer_of_step(1, step, 0.0, False) for step in range(50)} == {ROWS}
    assert {writer_of_step(1, step, 0.0, True) for step in range(50)} == {TEACHER}
    assert {writer_of_step(1, step, 1.0, True) for step in range(50)} == {STUDENT}


def test_a_prompt_ends_before_the_last_answer() -> None:
    """Two turns, a filler, and an answer that begins the row. The label at t is the token at t + 1."""
    weights = torch.tensor([[0, 1, 1, 0, 0, 1, 0], [0] * 7, [1, 1, 0, 0, 0, 0, 0]]).float()
    ids = torch.arange(21).view(3, 7)
    batch = Batch(ids, ids + 1, weights, ids % 7, torch.ones(3, 7, dtype=torch.bool))
    assert last_prompts(batch) == [(0, 1, 2, 3, 4, 5), None, (14,)]
