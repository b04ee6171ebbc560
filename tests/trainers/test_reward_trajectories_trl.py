"""Reward models step by step beside TRL's RewardTrainer, on several layouts and engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainers.test_trajectories_trl import SLOW, SPREAD, assert_same, folder, of_trl, ours  # noqa: F401 (a fixture)


@pytest.mark.process
@SLOW
@pytest.mark.parametrize(
    "layout",
    [
        ("--tp", 2),
        ("--pp", 2),
        ("--cp", 2),
        SPREAD,
        ("--tp", 2, "--packing", "false"),
        ("--tp", 2, "--pp", 2),
        ("--engine", "ddp", *SPREAD),
        ("--engine", "zero3", *SPREAD),
    ],
)
def test_reward_model(layout: tuple[object, ...], folder: Path, tmp_path: Path) -> None:  # noqa: F811
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(5)
    AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1).save_pretrained(
        folder / "scored"
    )
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / "scored")
    theirs = of_trl(folder, "rm", center_rewards_coefficient=0.01)
    assert_same(ours(folder, tmp_path / "out", "rm", "--center_rewards_coefficient", 0.01, *layout), theirs)
