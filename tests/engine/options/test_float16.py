"""The options of float16's loss scale: without float16 they are left out, and scales are powers of two."""

from __future__ import annotations

import pytest

from megaswift.engine.options.optimizer import OptimConfig
from megaswift.engine.options.optimizer_checks import LOSS_SCALE_CLASHES
from tests.config.refusals import assert_contradiction, assert_idle, problems

IDLE = ["--initial_loss_scale 1024", "--min_loss_scale 2", "--loss_scale_window 100", "--hysteresis 1"]
CLASHING = ["--initial_loss_scale 1000", "--min_loss_scale 3", "--initial_loss_scale 2 --min_loss_scale 4"]


@pytest.mark.parametrize("words", IDLE)
@pytest.mark.parametrize("other", ["--bf16 true", "--torch_dtype float32"])
def test_without_float16_they_are_left_out(words: str, other: str) -> None:
    assert_idle(f"{words} {other}", f"{words} --fp16 true")


@pytest.mark.parametrize(("words", "clash"), list(zip(CLASHING, LOSS_SCALE_CLASHES, strict=True)))
def test_contradictions(words: str, clash: object) -> None:
    assert_contradiction(words.split()[0][2:], f"{words} --fp16 true")


def test_the_defaults_of_megatron_core() -> None:
    """But for the first scale: 2^32 overflows for some 20 steps."""
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    theirs, own = OptimizerConfig(), OptimConfig()
    for name in ("min_loss_scale", "loss_scale_window", "hysteresis"):
        assert getattr(own, name) == getattr(theirs, name)
    assert own.initial_loss_scale == 2**16 and problems("--fp16 true") == []
