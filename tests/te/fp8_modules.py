"""Runs Transformer Engine's FP8 modules on the test device beside fp8_reference.py.

`python -m tests.te.fp8_modules RELEASE` prints one line a module, recipe and format: the largest relative difference
of outputs and gradients, over five steps of delayed scaling.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tests.te import fp8_reference as reference

MODULES = ("Linear", "LayerNormLinear", "GroupedLinear")
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
FORMATS = ("e4m3", "hybrid")
ROWS = 160


@dataclass(frozen=True)
class Sizes:
    """Of a module: no multiples of a block, where the recipe allows it."""

    width: int = 144
    out: int = 176
    splits: tuple[int, ...] = (48, 0, 112)


MX_SIZES = Sizes(160, 96, (64, 0, 96))
SIZES, HISTORY = (1.0, 9.0, 0.3, 0.2, 0.1), 3
"""Of inputs by step, and the length of delayed scaling's histories, which forget the largest."""


def engine_recipe(name: str, form: str) -> Any:
    """Transformer Engine's recipe."""
    from transformer_engine.common import recipe as recipes

    fp8_format = recipes.Format.HYBRID if form == "hybrid" else recipes.Format.E4M3
    if name == "delayed":
        return recipes.DelayedScaling(fp8_format=fp8_format, amax_history_len=HISTORY, amax_compute_algo="max")
    kinds = {
        "tensorwise": recipes.Float8CurrentScaling,
        "blockwise": recipes.Float8BlockScaling,
        "mxfp8": recipes.MXFP8BlockScaling,
    }
    return kinds[name](fp8_format=fp8_format)


def modules(kind: str, sizes: Sizes) -> tuple[Any, Any]:
    """Transformer Engine's module, and a function of the reference on its parameters."""
    import transformer_engine.pytorch as te

    torch.manual_seed(0)
    width, out, splits = sizes.width, sizes.out, list(sizes.splits)
    if kind == "GroupedLinear":
        grouped = te.GroupedLinear(len(splits), width, out, bias=False, params_dtype=torch.float32)
        weights = [getattr(grouped, f"weight{i}") for i in range(len(splits))]
        return lambda x: grouped(x, splits), (
            weights,
            lambda x, w, r: reference.grouped_linear(x, splits, w, r),
        )
    if kind == "LayerNormLinear":
        normed = te.LayerNormLinear(width, out, bias=False, normalization="RMSNorm", params_dtype=torch.float32)
        both = [normed.layer_norm_weight, normed.weight]
        return normed, (both, lambda x, w, r: reference.norm_linear(x, w[0], w[1], 1e-5, r))
    plain = te.Linear(width, out, bias=False, params_dtype=torch.float32)
    return plain, ([plain.weight], lambda x, w, r: reference.linear(x, w[0], r))


def difference(a: Tensor, b: Tensor) -> float:
    """The largest, by the largest value."""
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))


def compare(kind: str, name: str, form: str) -> float:
    """The worst of all steps."""
    from transformer_engine.pytorch import fp8_autocast

    sizes = MX_SIZES if name == "mxfp8" else Sizes()
    ours, (weights, function) = modules(kind, sizes)
    theirs = reference.Recipe(name, form == "hybrid", HISTORY)
    worst = 0.0
    for step, size in enumerate(SIZES if name == "delayed" else SIZES[:1]):
        generator = torch.Generator().manual_seed(step)
        x = (torch.randn(ROWS, sizes.width, generator=generator) * size).requires_grad_()
        d = torch.randn(ROWS, sizes.out, generator=generator) * size
        for w in weights:
            w.grad = None
        with fp8_autocast(enabled=True, fp8_recipe=engine_recipe(name, form)):
            y = ours(x)
        y.backward(d)
        copies = [w.detach().clone().requires_grad_() for w in weights]
        again = x.detach().clone().requires_grad_()
        want = function(again, copies, theirs)
        want.backward(d)
        theirs.end_step()
        worst = max(worst, difference(y, want), difference(x.grad, again.grad))
        worst = max(worst, *(difference(w.grad, c.grad) for w, c in zip(weights, copies, strict=True)))
    return worst


if __name__ == "__main__":
    from tests.te import cuda, device

    device.install(sys.argv[1])
    for case in product(MODULES, RECIPES, FORMATS):
        cuda.stand_for(cuda.BLACKWELL if case[1] == "mxfp8" else cuda.HOPPER)
        print(json.dumps([*case, compare(*case)]), flush=True)
