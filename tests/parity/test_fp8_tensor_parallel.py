"""FP8 products on tensor-parallel ranks, whose scales are of a rank's shards: the engine against a Hugging Face model
that quantizes these shards in plain torch. Delayed scaling, whose scales are of all ranks, is in test_fp8.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaswift.losses.sft import CrossEntropy
from tests.parity import fp8_oracle
from tests.parity.cases import own, parse
from tests.parity.fp8_oracle import Products
from tests.parity.measure import Task, build, full, recipe_options
from tests.parity.models import build as build_model
from tests.parity.oracle import Recipe, Reference
from tests.parity.pool import Pool
from tests.parity.test_fp8 import LIMIT, ROWS, Passes, Rows, distance, nearest, products, start_gpu

SHARE, FAR = 2.0**-12, 1e-2
"""How much smaller a second shard is than the first, and how far numbers of unsplit weights are at least."""


def uneven(variant: str, folder: Path) -> Path:
    """A model whose second shards of values and up projections are small, and those of the projections that follow
    large: one scale, or one block, across two shards would leave little of one of them."""
    ready = folder / f"{variant}-uneven"
    if not ready.exists():
        build_model(variant, ready)
        for file in ready.glob("*.safetensors"):
            tensors = load_file(file)
            for name, weight in tensors.items():
                if name.endswith(("v_proj.weight", "up_proj.weight")):
                    weight.chunk(2, 0)[1].mul_(SHARE)
                elif name.endswith(("o_proj.weight", "down_proj.weight")):
                    weight.chunk(2, 1)[1].div_(SHARE)
            save_file(tensors, file, {"format": "pt"})
    return ready


CASES = [
    ("tensorwise", "llama tp2"),
    ("tensorwise", "llama tp2 sp"),
    ("blockwise", "llama tp2"),
    ("blockwise", "llama-fp8 tp2 sp"),
    ("tensorwise", "llama tp2 sp dp2 do"),
    ("tensorwise", "llama pp2 tp2 sp"),
    ("tensorwise", "moe-nf4 tp2 sp etp2"),
    ("blockwise", "moe-fp8 tp2 sp etp2"),
]
QUICK = CASES[1:4]


def shape_of(recipe: str, layout: str) -> Rows:
    """Sequence-parallel ranks gather whole blocks of 128 tokens."""
    return Rows(tokens=256 if recipe == "blockwise" and " sp" in layout else 32)


@pytest.mark.process
@pytest.mark.parametrize(
    ("recipe", "layout"), [c if c in QUICK else pytest.param(*c, marks=pytest.mark.slow) for c in CASES]
)
def test_loss_and_gradients(recipe: str, layout: str, te_pool: Pool, models: Path) -> None:
    """Of every parameter; those of a model whose weights are not split are far away."""
    case = replace(parse(layout), te=True)
    folder, shape = uneven(case.model, models), shape_of(recipe, layout)
    rows = shape.of(case, 0)
    split, whole = (fp8_oracle.reference(folder, rows, p) for p in (products(case, recipe), Products(recipe)))
    assert distance(split.gradients, whole.gradients) > FAR
    assert nearest(case, recipe, te_pool, folder, shape) < LIMIT


def steps(rank: int, world: int, job: Passes) -> Reference:
    """An optimizer step a pass (on the ranks)."""
    task = job.task
    start_gpu(task)
    engine, context = build(task.case, task.folder, world, **recipe_options(task.recipe, False), **task.options)
    out = Reference()
    for batches in job.batches:
        result = engine.train_batch(
            own(batches, task.case.dp, context.layout.coordinates(rank).dp), CrossEntropy(), task.recipe.lr
        )
        out.losses.append(result.loss)
        out.norms.append(result.grad_norm)
    out.weights = full(engine.hf_weights())
    torch.distributed.barrier()
    context.close()
    return out


def relative(a: list[float], b: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def apart(got: Reference, want: Reference) -> float:
    """Losses and norms; weights, which Adam moves by more than the noise of their gradients, by a tenth."""
    return max(
        relative(got.losses, want.losses),
        relative(got.norms, want.norms),
        distance(got.weights, want.weights) / 10,
    )


@pytest.mark.process
@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("tensorwise", "llama tp2 sp"),
        pytest.param("tensorwise", "llama tp2", marks=pytest.mark.slow),
        pytest.param("blockwise", "llama tp2", marks=pytest.mark.slow),
        pytest.param("blockwise", "llama-fp8 tp2 sp", marks=pytest.mark.slow),
    ],
)
def test_training_steps(recipe: str, layout: str, te_pool: Pool, models: Path) -> None:
    """Losses, gradient norms and weights of three steps of AdamW, for a row where no value lies between two FP8 values;
    those of float32 are far away."""
    case, shape = replace(parse(layout), te=True), replace(shape_of(recipe, layout), passes=3)
    folder, seen = build_model(case.model, models / case.model), []
    options = {"fp8_format": "hybrid", "fp8_recipe": recipe}
    for seed in range(ROWS):
        rows = shape.of(case, seed)
        job = Passes(Task(case, folder, Recipe(), options=options), rows)
        got = te_pool.run("tests.parity.test_fp8_tensor_parallel:steps", job, case.world)[0]
        want, plain = (fp8_oracle.trajectory(folder, rows, Recipe(), p) for p in (products(case, recipe), None))
        assert relative(got.norms, plain.norms) > 1000 * LIMIT
        seen.append(apart(got, want))
        if seen[-1] < LIMIT:
            break
    assert min(seen) < LIMIT
