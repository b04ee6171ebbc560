"""The reference of an engine: the weights of a moment, kept through training, put in place and taken away again bit by
bit.

Covers: megaswift/engine/reference_weights.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megaswift.engine.options.engine import ZERO
from megaswift.losses.contract import ModelOutputs, RequestedModelOutputs
from megaswift.losses.sft import CrossEntropy
from tests.parity.cases import global_batch, own, parse
from tests.parity.measure import Task, build, full
from tests.parity.oracle import Oracle, Recipe
from tests.parity.pool import Pool
from tests.parity.references import References

pytestmark = pytest.mark.process
SHARE = 0.25


@dataclass(frozen=True)
class Seen:
    """What a rank saw. Scores of the same batch: before training, after, of the reference, after it; then after a
    move."""

    before: list[ModelOutputs]
    trained: list[ModelOutputs]
    reference: list[ModelOutputs]
    again: list[ModelOutputs]
    moved: list[ModelOutputs]
    third: float
    """Loss of the step after the reference was used."""
    weights: dict[str, Tensor]
    """Of the reference after it was moved."""
    of_model: dict[str, Tensor]
    of_base: dict[str, Tensor]


def use(rank: int, world: int, task: Task) -> Seen | None:
    """Two steps, the reference, a third step; and once more without the reference (on the ranks)."""
    engine, context = build(task.case, task.folder, world, **task.options)
    dp = context.layout.coordinates(rank).dp
    mine = [own(global_batch(task.case, k), task.case.dp, dp) for k in range(3)]
    needs, full_run = RequestedModelOutputs(), task.options.get("train_type") is None

    def weights() -> dict[str, Tensor]:
        return full(engine.hf_weights()) if full_run else {}

    before, base = engine.score(mine[2], needs), weights()
    engine.keep_reference(on_host=True)
    for k in (1, 2):
        engine.train_batch(mine[k], CrossEntropy(), 1e-3)
    trained = engine.score(mine[2], needs)
    with engine.reference():
        reference = engine.score(mine[2], needs)
    again = engine.score(mine[2], needs)
    third, now = engine.train_batch(mine[1], CrossEntropy(), 1e-3).loss, weights()
    moved, blended = again, {}
    if full_run:
        engine.move_reference(SHARE)
        with engine.reference():
            moved, blended = engine.score(mine[2], needs), weights()
    torch.distributed.barrier()
    context.close()
    return Seen(before, trained, reference, again, moved, third, blended, now, base) if rank == 0 else None


def plainly(rank: int, world: int, task: Task) -> float:
    """The loss of the third step of the same run without a reference (on the ranks)."""
    engine, context = build(task.case, task.folder, world, **task.options)
    mine = [own(global_batch(task.case, k), task.case.dp, context.layout.coordinates(rank).dp) for k in (1, 2, 1)]
    loss = [engine.train_batch(batch, CrossEntropy(), 1e-3).loss for batch in mine][-1]
    torch.distributed.barrier()
    context.close()
    return loss


def same(a: list[ModelOutputs], b: list[ModelOutputs]) -> bool:
    return all(
        torch.equal(x.logprobs, y.logprobs)
        for x, y in zip(a, b, strict=True)
        if x.logprobs is not None and y.logprobs is not None
    )


SLOW = pytest.mark.slow
CASES: list[Any] = [
    ("dense tp2 sp pp2", {}),
    ("dense dp2", {"engine": "fsdp2"}),
    *(
        pytest.param(text, options, marks=SLOW)
        for text, options in (
            ("moe dp2 ep2 do", {}),
            ("dense dp2 do", {"torch_dtype": "bfloat16"}),
            ("dense tp2 cp2 packed", {}),
            ("deepseek_v3 tp2 sp", {}),
            ("dense dp2", {"engine": "ddp"}),
            ("dense dp2", {"engine": "fsdp2", "fsdp": ("shard_grad_op",)}),
            ("dense dp2 packed", {"engine": "fsdp2", "torch_dtype": "bfloat16"}),
            *(("dense dp2", {"engine": kind}) for kind in ZERO),
        )
    ),
]


@pytest.mark.parametrize(("text", "options"), CASES)
def test_a_reference_stays_what_it_was(text: str, options: dict[str, Any], pool: Pool, references: References) -> None:
    case = parse(text)
    folder = references.model(case.variant)
    task = Task(case, folder, Recipe(), options=options)
    seen: Seen = pool.run("tests.parity.test_reference:use", task, case.world)[0]
    assert not same(seen.trained, seen.before), "training changes the model"
    assert same(seen.reference, seen.before) and same(seen.again, seen.trained)
    assert not same(seen.moved, seen.reference)
    if "torch_dtype" not in options:
        oracle = Oracle(folder, Recipe())
        for batch, found in zip(own(global_batch(case, 2), case.dp, 0), seen.reference, strict=True):
            assert float((found.logprobs - oracle.logprobs(batch)).abs().max()) < 1e-5 * max(1.0, oracle.largest)
    assert seen.third == pool.run("tests.parity.test_reference:plainly", task, case.world)[0]
    for name, tensor in seen.weights.items():
        expected = SHARE * seen.of_model[name] + (1 - SHARE) * seen.of_base[name]
        limit = 1e-2 if "torch_dtype" in options else 1e-6
        assert float((tensor - expected).abs().max()) <= limit * max(1.0, float(expected.abs().max())), name


ADAPTERS: list[Any] = [
    ("dense tp2", {}),
    *(
        pytest.param(text, options, marks=SLOW)
        for text, options in (
            ("dense dp2", {"engine": "ddp"}),
            ("dense dp2", {"engine": "fsdp2"}),
            ("dense pp2", {"use_dora": True}),
        )
    ),
]


@pytest.mark.parametrize(("text", "options"), ADAPTERS)
def test_new_adapters_are_off_in_the_reference(
    text: str, options: dict[str, Any], pool: Pool, references: References
) -> None:
    case = parse(text)
    task = Task(case, references.model(case.variant), Recipe(), options={**options, "train_type": "lora"})
    seen: Seen = pool.run("tests.parity.test_reference:use", task, case.world)[0]
    assert not same(seen.trained, seen.before) and same(seen.again, seen.trained)
    for a, b in zip(seen.reference, seen.before, strict=True):
        torch.testing.assert_close(a.logprobs, b.logprobs, atol=1e-5 if "use_dora" in options else 0, rtol=0)
