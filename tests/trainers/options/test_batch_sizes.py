"""global batch = per device x accumulation x data-parallel ranks, by hand."""

import pytest

from megaswift.config import SwiftConfig
from megaswift.errors import ConfigError
from megaswift.trainers.options.batch_sizes import BatchPlan, batch_plan


@pytest.mark.parametrize(
    "options, dp, plan",
    [
        ({}, 4, (1, 1, 4)),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}, 4, (2, 3, 24)),
        ({"global_batch_size": 16}, 4, (1, 4, 16)),
        ({"global_batch_size": 16, "micro_batch_size": 2}, 2, (2, 4, 16)),
        ({"global_batch_size": 16, "gradient_accumulation_steps": 4}, 4, (1, 4, 16)),
        ({"global_batch_size": 24, "micro_batch_size": 2, "gradient_accumulation_steps": 3}, 4, (2, 3, 24)),
    ],
)
def test_plan(options: dict, dp: int, plan: tuple[int, int, int]) -> None:
    assert batch_plan(SwiftConfig(**options).train, dp) == BatchPlan(*plan)


@pytest.mark.parametrize(
    "options, dp, part",
    [
        (
            {"global_batch_size": 10},
            4,
            (
                "is not a multiple of per_device_train_batch_size 1 x 4 data-parallel ranks = 4\n    try: "
                "--global_batch_size 8"
            ),
        ),
        ({"global_batch_size": 2}, 4, "try: --global_batch_size 4"),
        (
            {"global_batch_size": 24, "micro_batch_size": 2, "gradient_accumulation_steps": 3},
            2,
            "batch sizes are inconsistent: per_device_train_batch_size 2 x gradient_accumulation_steps 3 x 2 "
            "data-parallel ranks = 12\n"
            "    try: --global_batch_size 12, or --gradient_accumulation_steps 6",
        ),
    ],
)
def test_disagreement(options: dict, dp: int, part: str) -> None:
    cfg = SwiftConfig(**options)
    with pytest.raises(ConfigError) as caught:
        batch_plan(cfg.train, dp)
    assert part in str(caught.value)


def test_disagreement_is_told_as_early_as_it_is_known() -> None:
    SwiftConfig(gbs=24, micro_batch_size=2, gradient_accumulation_steps=3)
    with pytest.raises(ConfigError, match="gbs=24: batch sizes are inconsistent"):
        SwiftConfig(gbs=24, micro_batch_size=2, gradient_accumulation_steps=3, dp=2)
    with pytest.raises(ConfigError, match="gbs=7: is not a multiple of"):
        SwiftConfig(gbs=7, micro_batch_size=2, gradient_accumulation_steps=3)
