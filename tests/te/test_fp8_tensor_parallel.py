"""Transformer Engine's FP8 modules on two tensor-parallel ranks against plain torch, which quantizes shards.

Covers: tests/te/fp8_shards.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.parity.pool import Pool, shared
from tests.te import fp8_shards
from tests.te.fp8_modules import HISTORY, difference
from tests.te.fp8_reference import Recipe
from tests.te.fp8_tensor_parallel_ranks import EPSILON, RANKS, STEPS, Passes, Run, change, inputs, shard, weights
from tests.te.sources import RELEASES

JOB = "tests.te.fp8_tensor_parallel_ranks:passes"
LIMIT, FAR = 1e-6, 1e-2


def oracle(run: Run, ranks: int = RANKS) -> Passes:
    """The same steps in one process, whose weights are quantized in as many shards."""
    recipes = [Recipe(run.recipe, run.form == "hybrid", HISTORY) for _ in range(2)]
    held = {name: whole.requires_grad_() for name, whole in weights().items()}
    out = Passes([], [])
    for step in range(STEPS):
        x, d = inputs(step)
        x.requires_grad_()
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * held["norm"]
        inner = torch.nn.functional.silu(fp8_shards.column_parallel(normed, held["column"], ranks, recipes[0]))
        y = fp8_shards.row_parallel(inner, held["row"], ranks, recipes[1])
        y.backward(d)
        for recipe in recipes:
            recipe.end_step()
        out.outputs.append(y.detach())
        out.gradients.append({"input": x.grad, **{n: w.grad for n, w in held.items()}})
        held = {n: (w.detach() - change(n, w.grad, None)).requires_grad_() for n, w in held.items()}
    return out


def of_rank(name: str, whole: Tensor, rank: int, sequence_parallel: bool) -> Tensor:
    """What a rank has of an output or a gradient."""
    if name in ("output", "input"):
        return whole.chunk(RANKS)[rank] if sequence_parallel else whole
    return shard(name, whole, rank)


def distances(found: list[Passes], want: Passes, sequence_parallel: bool) -> list[float]:
    """The worst difference of each step; the norm's gradient is a sum over sequence-parallel ranks."""
    worst = []
    for step in range(STEPS):
        seen = []
        for rank, got in enumerate(found):
            pairs = {"output": (got.outputs[step], want.outputs[step])}
            pairs |= {n: (g, want.gradients[step][n]) for n, g in got.gradients[step].items()}
            if sequence_parallel:
                pairs["norm"] = (sum(p.gradients[step]["norm"] for p in found), want.gradients[step]["norm"])
            seen += [difference(a, of_rank(n, b, rank, sequence_parallel)) for n, (a, b) in pairs.items()]
        worst.append(max(seen))
    return worst


CASES = [
    ("delayed", False),
    ("tensorwise", False),
    ("blockwise", False),
    ("delayed", True),
    ("tensorwise", True),
    ("blockwise", True),
    ("mxfp8", True),
]
IDS = [f"{recipe} tp{RANKS}{' sp' * sequence_parallel}" for recipe, sequence_parallel in CASES]


def compare(run: Run, pool: Pool) -> None:
    """Outputs and gradients of every step. Under tensorwise and blockwise scaling those of unsplit weights are far
    away: delayed scaling has one scale for all shards, and MXFP8's blocks of 32 do not cross a shard's end."""
    found = pool.run(JOB, run, RANKS)
    assert max(distances(found, oracle(run), run.sequence_parallel)) < LIMIT
    if run.recipe in ("tensorwise", "blockwise"):
        assert min(distances(found, oracle(run, 1), run.sequence_parallel)) > FAR


@pytest.mark.process
@pytest.mark.parametrize(("recipe", "sequence_parallel"), CASES, ids=IDS)
def test_two_ranks(recipe: str, sequence_parallel: bool, te_pool: Pool) -> None:
    """The oldest release."""
    compare(Run(recipe, sequence_parallel), te_pool)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(("recipe", "sequence_parallel"), CASES, ids=IDS)
def test_the_newest_release(recipe: str, sequence_parallel: bool) -> None:
    """Gradients in E4M3 too."""
    for form in ("hybrid", "e4m3"):
        compare(Run(recipe, sequence_parallel, form), shared(RELEASES[-1]))


@pytest.mark.process
@pytest.mark.parametrize("case", [("delayed", False), ("tensorwise", True)], ids=["delayed tp2", "tensorwise tp2 sp"])
def test_scales_of_each_rank_alone_are_seen(case: tuple[str, bool], te_pool: Pool) -> None:
    """Without the reduction of the largest magnitudes over the ranks: delayed scaling from the second step on."""
    run = Run(*case, fault=True)
    found = distances(te_pool.run(JOB, run, RANKS), oracle(run), run.sequence_parallel)
    assert min(found[1:]) > FAR
