"""Layouts whose gathers of weights and reductions of gradients run behind the computation, against Hugging Face on one
process: nothing is read before it has arrived."""

from __future__ import annotations

import pytest

from tests.parity.cases import parse
from tests.parity.compare import compare, table
from tests.parity.measure import Task
from tests.parity.pool import Pool
from tests.parity.references import References

pytestmark = pytest.mark.process
BOTH = {"overlap_grad_reduce": True, "overlap_param_gather": True}
DEFAULT = ["dense dp2 do", "dense pp2 vpp2 dp2 do tied", "moe dp2 ep2 do"]
REST = [
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
    differences = compare(got, want, recipe)
    assert not any(d.bad for d in differences), "\n" + table(text, differences)
    for kinds in (counts, *(kinds for _, kinds in others)):
        assert kinds["gather"] > 3 and kinds["scatter"] >= 3 and kinds["reduce"] >= 1, kinds
