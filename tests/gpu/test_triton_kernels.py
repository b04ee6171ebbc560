"""Our Triton kernels on a GPU beside plain torch there. Triton's interpreter shows the same on a CPU, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import megaswift.engine.megatron  # noqa: F401 - before megatron.core
from megaswift.engine.megatron.optim import adam_update as adam
from megaswift.engine.megatron.optim.bf16_remainders import join_bf16_remainder
from megaswift.losses.contract import FIELDS
from tests.engine import run_triton_kernels
from tests.engine.megatron.precision_aware_parameters import KINDS, Kind, clones, drawn, numbers

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SIZES = 0, 7, 4096, 32768 + 16, 100_003
ROUNDED = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""By dtype, relative to the larger one: compilers contract products and sums, each in its own way."""


def values(p: adam.AdamTensors) -> list[Tensor]:
    """Weight, main weight, moments; the first two joined where they are parts of one number."""
    if p.main is not None and p.main.dtype == torch.int16:
        return [join_bf16_remainder(p.weight, p.main), p.first, p.second]
    return [t for t in (p.weight, p.main, p.first, p.second) if t is not None]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_precision_aware_update(kind: Kind) -> None:
    """Whole chunks and parts of one, one parameter that begins at an odd address. A skipped step leaves every bit."""
    from megaswift.engine.megatron.optim import adam_update_triton as kernels

    torch.manual_seed(0)
    rule = adam.AdamRule(*map(adam._float32, (1e-2, 0.9, 0.95, 1e-8, 0.1)))
    with torch.device(DEVICE):
        mine = [drawn(kind, n) for n in SIZES]
        mine.append(adam.AdamTensors(*(None if t is None else t[1:] for t in drawn(kind, 5000))))  # type: ignore[arg-type]
        tables: adam.LaunchTables = {}
        for skip in (1, 0, 1, 0):
            before, theirs = clones(mine), clones(mine)
            kernels.update_by_triton(mine, numbers(skip, 0.37, 3, rule), rule, tables)
            for p in theirs:
                adam.update_by_torch(p, numbers(skip, 0.37, 3, rule), rule)
            for p, q, old in zip(mine, theirs, before, strict=True):
                for got, want, kept in zip(values(p), values(q), values(old), strict=True):
                    assert not skip or torch.equal(got, kept)
                    limit = ROUNDED[got.dtype]
                    torch.testing.assert_close(got, want, rtol=limit, atol=limit / 10)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.first == kind.second == torch.float32], ids=str)
def test_precision_aware_update_beside_transformer_engine(kind: Kind) -> None:
    """A step of its kernels on the same device; every release takes float32 moments."""
    from megaswift.engine.megatron.optim import adam_update_triton as kernels

    tex = pytest.importorskip("transformer_engine_torch")
    theirs_of = tex.multi_tensor_adam_param_remainder if kind.main == torch.int16 else tex.multi_tensor_adam
    torch.manual_seed(0)
    rule = adam.AdamRule(*map(adam._float32, (1e-2, 0.9, 0.95, 1e-8, 0.1)))
    with torch.device(DEVICE):
        mine = [drawn(kind, n) for n in SIZES[1:]]
        theirs = clones(mine)
        kernels.update_by_triton(mine, numbers(0, 1.0, 3, rule), rule, {})
        order = ("gradient", "weight", "first", "second", *(["main"] if kind.main is not None else []))
        lists = [[getattr(p, name) for p in theirs] for name in order]
        *rates, decay = rule
        theirs_of(2048 * 32, torch.zeros(1, dtype=torch.int), lists, *rates, 3, 1, 1, decay)
    for p, q in zip(mine, theirs, strict=True):
        for got, want in zip(values(p), values(q), strict=True):
            torch.testing.assert_close(got, want, rtol=ROUNDED[got.dtype], atol=ROUNDED[got.dtype] / 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vocabulary_head(dtype: torch.dtype) -> None:
    """Log-probabilities, all fields, entropy alone; a soft cap; labels that other shards have."""
    every = tuple(f for f in FIELDS if f != "correct")
    cases = itertools.product((None, 3.0), (("logprobs",), every, ("entropy",)), (0, run_triton_kernels.FIRST))
    for cap, names, first in cases:
        if not (first and cap):
            with torch.device(DEVICE):
                fields, gradient = run_triton_kernels.run(dtype, cap, names, first)
            assert fields < 1e-5 and gradient < (1e-5 if dtype == torch.float32 else 2**-7), (cap, names, first)
