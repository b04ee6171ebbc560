"""Which options go with --fit."""

from __future__ import annotations

import pytest

from megaswift.config import SwiftConfig, load_config
from megaswift.errors import ConfigError
from megaswift.parallel.options.checks import FIT_CLASHES
from tests.config.refusals import assert_contradiction, assert_idle, problems

IDLE = [("--device_memory 80GiB", "--device_memory 80GiB --fit")]
CLASHING = [
    ("layout", "--layout auto"),
    ("device_memory", "--fit --device_memory plenty"),
    ("device_memory", "--fit --device_memory 12"),
    ("fit", "--fit --engine fsdp2"),
]


@pytest.mark.parametrize("idle, used", IDLE)
def test_an_option_that_would_be_ignored(idle: str, used: str) -> None:
    assert_idle(idle, used)


@pytest.mark.parametrize("name, words", CLASHING)
def test_a_contradiction(name: str, words: str) -> None:
    assert_contradiction(name, words)


def test_every_row_is_tried() -> None:
    assert len(CLASHING) == len(FIT_CLASHES)


@pytest.mark.parametrize(
    "words",
    ["--fit --engine auto", "--fit --device_memory 512MB", "--fit --device_memory 65536", "--fit --device_memory 80e9"],
)
def test_sizes_and_engines(words: str) -> None:
    """A plain number is bytes; 80e9 is none."""
    assert bool(problems(words)) == ("80e9" in words)


@pytest.mark.parametrize("size", ["12", "12.5", "65535"])
def test_a_number_too_small_for_bytes(size: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config("sft", ["--fit", "--device_memory", size], environ={})
    (problem,) = error.value.problems
    assert (
        problem.rule.startswith("is a number of bytes without a unit") and problem.fix == f"--device_memory {size}GiB"
    )


def test_what_the_user_has_set_to_none_stays_known() -> None:
    """`--fit` does not choose it, also after another option has changed."""
    cfg = SwiftConfig(task="sft", recompute_granularity="none").replace(seed=3)
    assert "recompute_granularity" in cfg.typed and cfg.model.recompute_granularity is None
