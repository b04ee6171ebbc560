"""The torch engine against Hugging Face in one process: loss, gradients, steps and weights, on the micro-batches of the
native engine.

Covers: megaswift/engine/torch/strategies/ddp.py, megaswift/engine/torch/engine.py,
megaswift/engine/torch/strategies/fsdp.py, megaswift/engine/torch/router_losses.py,
megaswift/engine/torch/strategies/table.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megaswift.engine.options.engine import ZERO
from tests.parity.cases import Case, parse
from tests.parity.check import assert_within_limits
from tests.parity.compare import compare
from tests.parity.measure import Task
from tests.parity.pool import Pool
from tests.parity.references import References

pytestmark = pytest.mark.process

CASES = [
    ("ddp", "dense dp3"),
    ("fsdp2", "dense dp2 packed"),
    ("fsdp2", "moe dp2"),
    *(pytest.param(engine, "moe dp2", marks=pytest.mark.slow) for engine in ZERO),
    *(
        pytest.param(engine, text, marks=pytest.mark.slow)
        for engine in ("ddp", "fsdp2")
        for text in (
            "dense single",
            "dense dp2",
            "dense dp4 packed",
            "dense dp2 tied",
            "moe dp2 packed",
            "moe dp4",
            "qwen2 dp2",
            "gemma2 dp2 packed",
            "gpt_oss dp2",
            "qwen2_moe dp2 packed",
            "deepseek_v3 dp2",
        )
    ),
    *(
        pytest.param("ddp", f"{text} dp2", marks=pytest.mark.slow)
        for text in (
            "mixtral",
            "olmoe",
            "glm4_moe",
            "deepseek_v2",
            "deepseek_v2-greedy",
            "minimax_m2",
            "ernie4_5_moe",
            "moe filler",
            "moe-mixed packed",
        )
    ),
]


@pytest.mark.parametrize(("engine", "text"), CASES)
def test_equals_hugging_face(engine: str, text: str, pool: Pool, references: References) -> None:
    case: Case = parse(text)
    folder, recipe, want = references.of(case)
    task = Task(
        case, folder, recipe, options={"engine": engine, "recompute_granularity": "full" if case.tied else None}
    )
    got = pool.run("tests.parity.measure:train", task, case.world)[0]
    # buffers have none here, zero there
    trained = {n: g for n, g in want.gradients.items() if n in got.gradients or bool(g.any())}
    differences = compare(got, replace(want, gradients=trained), recipe)
    assert_within_limits(differences, case, pool, folder, task.options)


@pytest.mark.parametrize("text", ["dense dp2 packed", pytest.param("moe dp2", marks=pytest.mark.slow)])
def test_units_by_size_and_prefetch(text: str, pool: Pool, references: References) -> None:
    """Units within layers, of several sizes, gathered at other times: the same gradients."""
    case = parse(text)
    folder, recipe, want = references.of(case)
    options = {"fsdp_min_num_params": 500, "fsdp_forward_prefetch": True, "fsdp_backward_prefetch": "no_prefetch"}
    task = Task(case, folder, recipe, options={"engine": "fsdp2", **options})
    got = pool.run("tests.parity.measure:train", task, case.world)[0]
    differences = compare(got, want, recipe)
    assert_within_limits(differences, case, pool, folder, task.options)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_sees_a_label_that_is_dropped(engine: str, pool: Pool, references: References) -> None:
    case = parse("dense dp2")
    folder, recipe, want = references.of(case)
    options = {"engine": engine}
    got = pool.run("tests.parity.measure:train", Task(case, folder, recipe, 1, "mask", options), case.world)[0]
    assert any(d.bad for d in compare(got, want, recipe))
