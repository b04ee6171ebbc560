"""Exchanges of tokens behind another micro-batch's passes (Megatron-Core's combined schedule): loss, gradients and
steps are those of Hugging Face.

Covers: megaswift/engine/megatron/layers/moe/router.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.parity import measure
from tests.parity.cases import parse
from tests.parity.check import check
from tests.parity.measure import Task
from tests.parity.oracle import Reference
from tests.parity.pool import Pool, RankError
from tests.parity.references import References

pytestmark = pytest.mark.process
OVERLAP = {"overlap_moe_expert_parallel_comm": True}
DEFAULT = ["moe dp2 ep2", "moe pp2 vpp2 dp2 ep2"]
REST = [
    "moe tp2 sp dp2 ep2",
    "moe pp2 vpp2 dp2 ep2 do",
    "moe dp2 ep2 packed",
    "moe cp2 ep2",
    "qwen2_moe dp2 ep2",
]


def train(rank: int, world: int, task: Task) -> Reference | None:
    """The numbers of the case, whose every pass of training is scheduled in parts."""
    from megaswift.engine.megatron.model import SwiftGPT

    planned = []
    plan = SwiftGPT.plan

    def counted(self: SwiftGPT, step: object) -> object:
        planned.append(step)
        return plan(self, step)  # type: ignore[arg-type]

    SwiftGPT.plan = counted  # type: ignore[method-assign]
    found = measure.train(rank, world, task)
    chunks = task.case.vpp
    assert len(planned) >= (1 + task.steps) * chunks * task.case.total // task.case.dp, "passes are not scheduled"
    return found


@pytest.mark.parametrize("text", [*DEFAULT, *(pytest.param(case, marks=pytest.mark.slow) for case in REST)])
def test_steps_are_those_of_hugging_face(text: str, pool: Pool, references: References) -> None:
    check(parse(text), pool, references, OVERLAP, "tests.parity.test_expert_overlap:train")


@pytest.mark.slow
def test_a_dense_last_layer_is_refused(pool: Pool, references: References, tmp_path: Path) -> None:
    """Megatron-Core's schedule leaves out the final norm there."""
    case = parse("moe-mixed dp2 ep2")
    folder = references.model(case.variant)
    config = json.loads((folder / "config.json").read_text())
    dense = [config["num_hidden_layers"] - 1]
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config | {"mlp_only_layers": dense}))
    task = Task(case, tmp_path, references.of(case)[1], options=OVERLAP)
    with pytest.raises(RankError, match="leaves out the final norm behind a layer without experts"):
        pool.run("tests.parity.measure:train", task, case.world)
