"""The engine with FP8 products on the test device: against a Hugging Face model whose linear layers are quantized in
plain torch, and against float32.

Covers: tests/parity/fp8_oracle.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megaswift.losses.contract import Batch
from megaswift.losses.sft import CrossEntropy
from tests.parity import fp8_oracle
from tests.parity.cases import parse
from tests.parity.measure import Task, build, full
from tests.parity.models import VOCAB
from tests.parity.models import build as build_model
from tests.parity.oracle import Recipe, Reference
from tests.parity.pool import Pool
from tests.parity.references import References

RECIPES = ("delayed", *(pytest.param(r, marks=pytest.mark.slow) for r in ("tensorwise", "blockwise")))
ROWS = 6
TRAIN = "tests.parity.measure:train"


def batch(seed: int, tokens: int = 32) -> Batch:
    """One row without padding."""
    ids = torch.randint(3, VOCAB, (1, tokens + 1), generator=torch.Generator().manual_seed(seed))
    return Batch(
        input_ids=ids[:, :-1],
        labels=ids[:, 1:],
        loss_weights=torch.ones(1, tokens),
        positions=torch.arange(tokens)[None],
        valid=torch.ones(1, tokens, dtype=torch.bool),
    )


def gradients(rank: int, world: int, task: Task) -> Reference:
    """Loss and gradients of the task's micro-batches."""
    engine, context = build(task.case, task.folder, world, **task.options)
    loss = engine.accumulate(list(task.batches), CrossEntropy()).loss
    out = Reference(loss=loss, gradients=full(engine.hf_gradients()))
    torch.distributed.barrier()
    context.close()
    return out


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest relative norm of a difference."""
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).norm() / b[n].norm()) for n in b)


@pytest.mark.process
@pytest.mark.parametrize("recipe", RECIPES)
def test_quantized_model(recipe: str, te_pool: Pool, models: Path) -> None:
    """Loss and every gradient; float32's are far away.

    A value between two FP8 values rounds either way with the last bit of float32, and from there on all numbers differ
    by as much as FP8's noise: of a few short rows one has no such value.
    """
    folder = build_model("llama", models / "llama")
    options = {"fp8_format": "hybrid", "fp8_recipe": recipe}
    case, seen = replace(parse("single", model="llama"), te=True), []
    for seed in range(ROWS):
        rows = batch(seed)
        task = Task(case, folder, Recipe(), options=options, batches=[rows])
        (got,) = te_pool.run("tests.parity.test_fp8:gradients", task, 1)
        want, plain = (fp8_oracle.reference(folder, rows, name, "hybrid") for name in (recipe, ""))
        assert distance(got.gradients, plain.gradients) > 0.05
        seen.append(max(abs(got.loss - want.loss), distance(got.gradients, want.gradients)))
        if seen[-1] < 1e-5:
            return
    pytest.fail(f"largest differences of the rows: {seen}")


@pytest.mark.process
@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_of_float32(recipe: str, te_pool: Pool, references: References) -> None:
    """Three steps within 2%; with a pipeline and with recomputation the first pass is that of one rank. Later steps are
    not held equal: blockwise with recomputation differs in the third loss by 2e-4, which is not explained."""
    runs = []
    for text in ("dense te", "dense te pp2", "dense te recompute=full"):
        case = parse(text)
        folder, optimizer, want = references.of(case)
        options = {"fp8_format": "hybrid", "fp8_recipe": recipe}
        runs.append(te_pool.run(TRAIN, Task(case, folder, optimizer, options=options), case.world)[0])
        assert runs[-1].losses == pytest.approx(want.losses, rel=0.02)
        assert runs[-1].losses != pytest.approx(want.losses, rel=1e-4)
    for other in runs[1:]:
        assert other.loss == pytest.approx(runs[0].loss, rel=1e-6)
        assert distance(other.gradients, runs[0].gradients) < 1e-5
