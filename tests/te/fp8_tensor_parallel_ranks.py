"""The rank side of test_fp8_tensor_parallel.py: a column-parallel and a row-parallel module of Transformer Engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.te import cuda
from tests.te.fp8_modules import engine_recipe

RANKS, STEPS, EPSILON = 2, 3, 1e-5
TOKENS, WIDTH, INNER = 256, 128, 192
"""Sequence-parallel ranks gather whole blocks of 128 tokens and channels; a shard of the inner width is not one of
them."""
RATE, SHARE = 2.0**-9, 2.0**-13
"""Of gradient descent, and how much smaller than the first shard of the first product the second one is."""


@dataclass(frozen=True)
class Run:
    """`fault` leaves the scales of each rank as they are: no largest magnitudes are reduced."""

    recipe: str
    sequence_parallel: bool
    form: str = "hybrid"
    fault: bool = False


@dataclass
class Passes:
    """Of each step: output, input's gradient and the weights' gradients; on a rank, its part."""

    outputs: list[Tensor]
    gradients: list[dict[str, Tensor]]


def weights() -> dict[str, Tensor]:
    """Whole: [k], [n, k], [k, n]. The second shard of the first product is small and that of the second large: a scale
    of both, or a block across the two, would leave nothing of one of them."""
    generator = torch.Generator().manual_seed(3)
    column = torch.randn(INNER, WIDTH, generator=generator) * 0.1
    row = torch.randn(WIDTH, INNER, generator=generator) * 0.1
    column[INNER // 2 :] *= SHARE
    row[:, INNER // 2 :] /= SHARE
    return {"norm": torch.rand(WIDTH, generator=generator) + 0.5, "column": column, "row": row}


def inputs(step: int) -> tuple[Tensor, Tensor]:
    """(input, output's gradient) [t, k] of a step; the second half of the tokens is smaller."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(TOKENS, WIDTH, generator=generator)
    d = torch.randn(TOKENS, WIDTH, generator=generator) * (1.0, 7.0, 0.3)[step]
    x[:, ::7] *= (1.0, 3.0, 0.2)[step]
    d[TOKENS // 2 :] *= 0.1
    x[TOKENS // 2 :, ::7] *= 0.3  # RMSNorm takes away what is common to a token
    return x, d


def shard(name: str, whole: Tensor, rank: int) -> Tensor:
    """A rank's part of a weight or of its gradient."""
    axis = {"norm": None, "column": 0, "row": 1}[name]
    return whole if axis is None else whole.chunk(RANKS, axis)[rank]


def change(name: str, gradient: Tensor, rank: int | None) -> Tensor:
    """A step of gradient descent on a rank's shard, or on all: shards move by the same part of themselves. The norm
    stays, whose gradient is a sum over sequence-parallel ranks."""
    rates = torch.tensor([RATE, RATE * {"norm": 1.0, "column": SHARE**2, "row": SHARE**-2}[name]])
    if name == "norm":
        return torch.zeros_like(gradient)
    every = rates.repeat_interleave(INNER // 2) if rank is None else rates[rank].expand(INNER // 2)
    return gradient * (every[:, None] if name == "column" else every)


def _modules(run: Run, rank: int, group: Any) -> tuple[Any, Any, dict[str, Tensor]]:
    import transformer_engine.pytorch as te

    common = {
        "bias": False,
        "params_dtype": torch.float32,
        "tp_group": group,
        "tp_size": RANKS,
        "sequence_parallel": run.sequence_parallel,
    }
    column = te.LayerNormLinear(WIDTH, INNER, eps=EPSILON, normalization="RMSNorm", parallel_mode="column", **common)
    row = te.Linear(INNER, WIDTH, parallel_mode="row", **common)
    parameters = {"norm": column.layer_norm_weight, "column": column.weight, "row": row.weight}
    with torch.no_grad():
        for name, whole in weights().items():
            parameters[name].copy_(shard(name, whole, rank))
    return column, row, parameters


def _without_reductions() -> None:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    FP8GlobalStateManager.reduce_tensor_across_group_op_max = staticmethod(lambda *_: None)
    Float8CurrentScalingQuantizer.with_amax_reduction = property(lambda self: False, lambda self, value: None)


def passes(rank: int, world: int, run: Run) -> Passes:
    """Steps of gradient descent on this rank's shards."""
    import torch.distributed as dist
    from transformer_engine.pytorch import fp8_autocast

    dist.init_process_group("gloo")
    cuda.stand_for(cuda.BLACKWELL if run.recipe == "mxfp8" else cuda.HOPPER)
    if run.fault:
        _without_reductions()
    column, row, parameters = _modules(run, rank, dist.group.WORLD)
    out, recipe = Passes([], []), engine_recipe(run.recipe, run.form)
    for step in range(STEPS):
        x, d = inputs(step)
        if run.sequence_parallel:
            x, d = x.chunk(RANKS)[rank], d.chunk(RANKS)[rank]
        x = x.clone().requires_grad_()
        with fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group=dist.group.WORLD):
            y = row(torch.nn.functional.silu(column(x)))
        y.backward(d)
        out.outputs.append(y.detach().clone())
        out.gradients.append({"input": x.grad.clone(), **{n: p.grad.clone() for n, p in parameters.items()}})
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter -= change(name, parameter.grad, rank)
                parameter.grad = None
    dist.barrier()
    dist.destroy_process_group()
    return out
