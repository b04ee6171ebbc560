"""The bytes of the first screen, told before the first step, against the tensors that are there after it."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
import torch
from torch import Tensor

from megaswift.losses.sft import CrossEntropy
from tests.parity.cases import global_batch, own, parse
from tests.parity.measure import Task, build
from tests.parity.oracle import Recipe
from tests.parity.pool import Pool
from tests.parity.references import References

pytestmark = pytest.mark.process


def storages(tensors: list[Tensor]) -> int:
    """Bytes of the memory behind them, each block once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def held(rank: int, world: int, task: Task) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """(the report before the first step; elements, then bytes of weights, gradients, optimizer on this rank after it)
    (on the ranks)."""
    from megaswift.engine.megatron.optim import optimizer as optim

    engine, context = build(task.case, task.folder, world, **task.options)
    told = astuple(engine.report())
    mine = own(global_batch(task.case, 2), task.case.dp, context.layout.coordinates(rank).dp)
    assert not engine.train_batch(mine, CrossEntropy(), 1e-3).skipped
    parameters = [p for chunk in engine.plain for p in chunk.parameters()]
    states: list[Tensor] = []
    for part in optim.optimizer_parts(engine.optimizer):
        states += [
            t for state in part.optimizer.state.values() for t in state.values() if isinstance(t, Tensor) and t.dim()
        ]
        if engine.config.bf16:
            states += [p for group in part.optimizer.param_groups for p in group["params"]]
    assert all(t.dtype == torch.float32 for t in states)
    found = (
        sum(p.numel() for p in parameters),
        sum(p.nbytes for p in parameters),
        storages([p.main_grad for p in parameters]),
        sum(t.nbytes for t in states),
    )
    torch.distributed.barrier()
    context.close()
    return told, found


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("dense tp2 pp2", {}),
        ("moe tp2 sp dp2 ep2 do", {"torch_dtype": "bfloat16"}),
        ("dense dp2 do", {"optimizer": "adam"}),
        ("dense single", {"optimizer": "sgd", "torch_dtype": "bfloat16"}),
        ("dense single", {"optimizer": "sgd", "sgd_momentum": 0.0}),
    ],
    ids=str,
)
def test_what_the_screen_tells_is_there(text: str, options: dict[str, Any], pool: Pool, references: References) -> None:
    case = parse(text)
    task = Task(case, references.model(case.variant), Recipe(), options=options)
    ranks = pool.run("tests.parity.test_screen_bytes:held", task, case.world)
    told = {report for report, _ in ranks}
    assert len(told) == 1
    assert next(iter(told))[1:5] == tuple(max(values) for values in zip(*(found for _, found in ranks), strict=True))
