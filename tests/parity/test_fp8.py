"""The engine with FP8 products on the test device: against a Hugging Face model whose linear layers are quantized in
plain torch, and against float32.

Covers: tests/parity/fp8_oracle.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megaswift.losses.contract import Batch
from megaswift.losses.sft import CrossEntropy
from tests.parity import fp8_oracle, measure
from tests.parity.cases import Case, own, parse
from tests.parity.fp8_oracle import Products
from tests.parity.measure import Task, build, full, recipe_options
from tests.parity.models import VOCAB
from tests.parity.models import build as build_model
from tests.parity.oracle import Recipe, Reference
from tests.parity.pool import Pool
from tests.parity.references import References
from tests.te import cuda

RECIPES = ("delayed", *(pytest.param(r, marks=pytest.mark.slow) for r in ("tensorwise", "blockwise", "mxfp8")))
ROWS, LIMIT = 12, 1e-6
TRAIN = "tests.parity.test_fp8:train"


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


def packed_batch(seed: int, tokens: int = 32) -> Batch:
    """Three documents in one row."""
    row, bounds = batch(seed, tokens), [0, 8, 12, tokens]
    positions = torch.cat([torch.arange(b - a) for a, b in zip(bounds, bounds[1:], strict=False)])[None]
    weights = row.loss_weights.clone()
    weights[:, [b - 1 for b in bounds[1:]]] = 0.0
    return replace(row, positions=positions, loss_weights=weights, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))


@dataclass(frozen=True)
class Passes:
    """Rows of each pass, one a data-parallel rank."""

    task: Task
    batches: list[list[Batch]]


def start_gpu(task: Task) -> None:
    """The GPU that the recipe needs, in this rank's process."""
    if task.options["fp8_recipe"] == "mxfp8":
        cuda.stand_for(cuda.BLACKWELL)


def train(rank: int, world: int, task: Task) -> Reference | None:
    """`measure.train` (on the ranks)."""
    start_gpu(task)
    return measure.train(rank, world, task)


def gradients(rank: int, world: int, job: Passes) -> Reference:
    """Loss and gradients of the last pass; the weights do not change."""
    start_gpu(job.task)
    engine, context = build(job.task.case, job.task.folder, world, **job.task.options)
    out = Reference()
    for batches in job.batches:
        mine = own(batches, job.task.case.dp, context.layout.coordinates(rank).dp)
        out.loss = engine.accumulate(mine, CrossEntropy()).loss
        out.gradients = full(engine.hf_gradients())
    torch.distributed.barrier()
    context.close()
    return out


def without_end(row: Batch, padding: int) -> Batch:
    """The row with its last tokens turned into padding."""
    if not padding:
        return row
    ids, weights, valid = row.input_ids.clone(), row.loss_weights.clone(), row.valid.clone()
    ids[:, -padding:], weights[:, -padding - 1 :], valid[:, -padding:] = 0, 0.0, False
    return replace(row, input_ids=ids, loss_weights=weights, valid=valid)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest relative norm of a difference."""
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).norm() / b[n].norm()) for n in b)


def products(case: Case, recipe: str) -> Products:
    """Those of a layout."""
    return Products(recipe, tp=case.tp, etp=case.etp, cp=case.cp, ep=case.ep)


@dataclass(frozen=True)
class Rows:
    """Of a data-parallel rank: one a pass, of `tokens`, the last `padding` of which are padding."""

    passes: int = 1
    tokens: int = 32
    padding: int = 0

    def of(self, case: Case, seed: int) -> list[list[Batch]]:
        """Of all passes and ranks."""
        make = packed_batch if case.packed else batch
        seeds = [[ROWS * (k * case.dp + i) + seed for i in range(case.dp)] for k in range(self.passes)]
        return [[without_end(make(n, self.tokens), self.padding) for n in ranks] for ranks in seeds]


def nearest(case: Case, recipe: str, pool: Pool, folder: Path, shape: Rows = Rows()) -> float:
    """The smallest difference of loss and gradients from the oracle over a few rows; float32's are far away.

    A value between two FP8 values rounds either way with the last bit of float32, and from there on all numbers differ
    by a part of FP8's noise: of a few short rows one has no such value. The last pass is compared, whose scales come
    from the one before under delayed scaling.
    """
    seen, options = [], {"fp8_format": "hybrid", "fp8_recipe": recipe}
    if case.moe:
        options |= recipe_options(Recipe(aux_coeff=0.0, z_coeff=0.0), True)
    for seed in range(ROWS):
        rows = shape.of(case, seed)
        job = Passes(Task(case, folder, Recipe(), options=options), rows)
        got = pool.run("tests.parity.test_fp8:gradients", job, case.world)[0]
        want, plain = (fp8_oracle.reference(folder, rows, p) for p in (products(case, recipe), None))
        noise, off = distance(got.gradients, plain.gradients), distance(got.gradients, want.gradients)
        assert noise > 0.05
        seen.append(max(abs(got.loss - want.loss), off))
        if seen[-1] < LIMIT:
            break
    return min(seen)


@pytest.mark.process
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", ["", pytest.param("packed", marks=pytest.mark.slow)])
def test_quantized_model(recipe: str, rows: str, te_pool: Pool, models: Path) -> None:
    """Loss and every gradient."""
    folder = build_model("llama", models / "llama")
    case = replace(parse(f"single {rows}", model="llama"), te=True)
    assert nearest(case, recipe, te_pool, folder) < LIMIT


@pytest.mark.process
@pytest.mark.parametrize(
    "layout",
    [
        "tp2 sp packed",
        *(pytest.param(w, marks=pytest.mark.slow) for w in ("tp2", "tp2 sp", "cp2", "pp2", "cp2 tp2 sp")),
    ],
)
def test_quantized_model_on_layouts(layout: str, te_pool: Pool, models: Path) -> None:
    """Delayed scaling's first step has a scale of 1 everywhere, so that its numbers are those of one rank."""
    folder = build_model("llama", models / "llama")
    case = replace(parse(layout, model="llama"), te=True)
    assert nearest(case, "delayed", te_pool, folder) < LIMIT


@pytest.mark.process
@pytest.mark.parametrize(
    "recipe", ["tensorwise", *(pytest.param(r, marks=pytest.mark.slow) for r in ("blockwise", "mxfp8"))]
)
def test_scales_of_own_values_on_data_parallel_ranks(recipe: str, te_pool: Pool, models: Path) -> None:
    """Scales are of a rank's own values: each rank has one row, and the oracle quantizes each row by itself."""
    folder = build_model("llama", models / "llama")
    case = replace(parse("dp2 do", model="llama"), te=True)
    assert nearest(case, recipe, te_pool, folder) < LIMIT


@pytest.mark.process
@pytest.mark.parametrize(
    "layout",
    ["tp2 sp dp2", *(pytest.param(w, marks=pytest.mark.slow) for w in ("dp2", "tp2", "cp2", "pp2", "cp2 tp2 sp"))],
)
def test_scales_of_the_pass_before(layout: str, te_pool: Pool, models: Path) -> None:
    """Delayed scaling's second pass: its scales are of all ranks' largest magnitudes."""
    folder = build_model("llama", models / "llama")
    case = replace(parse(layout, model="llama"), te=True)
    assert nearest(case, "delayed", te_pool, folder, Rows(passes=2)) < LIMIT


@pytest.mark.process
@pytest.mark.parametrize(
    ("layout", "recipe"),
    [
        ("ep2 dp2", "delayed"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("etp2 tp2 sp", "delayed"),
                ("etp2 tp2 sp", "tensorwise"),
                ("ep2 dp2", "blockwise"),
                ("single", "delayed"),
                ("single", "tensorwise"),
                ("single", "blockwise"),
                ("single", "mxfp8"),
                ("ep2 dp2", "mxfp8"),
            ]
        ),
    ],
)
def test_quantized_experts(layout: str, recipe: str, te_pool: Pool, models: Path) -> None:
    """Every expert quantizes its own tokens, padded to the multiple that FP8 products need, and its own shard.
    Tensorwise scales are of all its tokens: with expert parallelism of several rows, which the oracle computes one by
    one."""
    model = "moe-nf4" if recipe == "mxfp8" or "etp2" in layout else "moe"  # whose sizes are multiples of 32, halves too
    folder = build_model(model, models / model)
    case = replace(parse(f"{model} {layout}"), te=True)
    assert nearest(case, recipe, te_pool, folder) < LIMIT


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_padding(recipe: str, te_pool: Pool, models: Path) -> None:
    """Rows that end in padding."""
    folder = build_model("llama", models / "llama")
    case = replace(parse("single", model="llama"), te=True)
    assert nearest(case, recipe, te_pool, folder, Rows(padding=5)) < LIMIT


@pytest.mark.process
@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_of_float32(recipe: str, te_pool: Pool, references: References) -> None:
    """Three steps within 2%; with a pipeline and with recomputation they are those of one rank."""
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
        assert other.losses == pytest.approx(runs[0].losses, rel=1e-6)
        assert distance(other.gradients, runs[0].gradients) < 1e-5
