"""Layouts whose gathers of weights and reductions of gradients run behind the computation, against Hugging Face on one
process: nothing is read before it has arrived."""

from __future__ import annotations

import pytest

from tests.parity.cases import parse
from tests.parity.check import assert_within_limits
from tests.parity.compare import NORM, compare
from tests.parity.measure import Task
from tests.parity.pool import Pool
from tests.parity.references import References

pytestmark = pytest.mark.process
BOTH = {"overlap_grad_reduce": True, "overlap_param_gather": True}
REDUCE = {"overlap_grad_reduce": True}
RECORD = "tests.parity.deferred:record"
DEFAULT = ["dense dp2 do", "dense pp2 vpp2 dp2 do tied", "moe dp2 ep2 do"]
FAMILIES = ("deepseek_v3", "gemma2", "gemma3_text", "glm4_moe", "gpt_oss", "minimax_m2", "olmo2", "phi3", "qwen2_moe")
REST = [
    *(f"{family} dp2 do" for family in FAMILIES),
    "dense dp2 do tied",
    "dense tp2 sp dp2 do",
    "dense pp2 dp2 do",
    "dense pp2 vpp2 dp2 do",
    "dense cp2 dp2 do recompute=full",
    "moe tp2 sp dp2 ep2 do",
    "moe pp2 vpp2 dp2 ep2 do",
    "moe-mixed dp2 do packed",
]


@pytest.mark.parametrize("text", [*DEFAULT, *(pytest.param(case, marks=pytest.mark.slow) for case in REST)])
def test_nothing_is_read_before_it_has_arrived(text: str, pool: Pool, references: References) -> None:
    case = parse(text)
    folder, recipe, want = references.of(case)
    (got, counts), *others = pool.run(
        "tests.parity.deferred:train", Task(case, folder, recipe, options=BOTH), case.world
    )
    assert_within_limits(compare(got, want, recipe), case, pool, folder, BOTH, RECORD)
    for kinds in (counts, *(kinds for _, kinds in others)):
        assert kinds["gather"] > 3 and kinds["scatter"] >= 3 and kinds["reduce"] >= 1, kinds


@pytest.mark.parametrize("text", ["dense pp2 vpp2 dp2 do", pytest.param("dense dp2 do", marks=pytest.mark.slow)])
def test_evaluation_between_steps(text: str, pool: Pool, references: References) -> None:
    """An evaluation gathers weights in its own order; the next step gathers them again."""
    case = parse(text)
    folder, recipe, want = references.of(case)
    task = Task(case, folder, recipe, options=BOTH)
    for losses in pool.run("tests.parity.deferred:evaluate_between_steps", task, case.world):
        expected = [want.losses[0], *(loss for loss in want.losses[1:] for _ in range(2))]
        assert losses == pytest.approx(expected, rel=NORM)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["dense dp2", "moe pp2 vpp2 dp2 ep2"])
def test_reductions_alone(text: str, pool: Pool, references: References) -> None:
    """Without the distributed optimizer there are no weights to gather."""
    case = parse(text)
    folder, recipe, want = references.of(case)
    task = Task(case, folder, recipe, options=REDUCE)
    got, counts = pool.run("tests.parity.deferred:train", task, case.world)[0]
    assert_within_limits(compare(got, want, recipe), case, pool, folder, REDUCE, RECORD)
    assert set(counts) == {"reduce"} and counts["reduce"] >= 4
