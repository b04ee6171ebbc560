"""Transformer Engine's FP8 modules against a quantize-dequantize reference in plain torch.

Covers: tests/te/kernels_quantize.py, tests/te/mxfp8_blocks.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product

import pytest
import torch

from tests.parity.pool import ROOT
from tests.te import fp8_reference as reference
from tests.te import kernels_quantize, mxfp8_blocks
from tests.te.fp8_modules import FORMATS, MODULES, RECIPES
from tests.te.registry import DType
from tests.te.sources import RELEASES


@pytest.mark.process
@pytest.mark.parametrize("release", [RELEASES[0], pytest.param(RELEASES[1], marks=pytest.mark.slow)])
def test_modules(release: str) -> None:
    """Outputs and gradients by module, recipe and format."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.te.fp8_modules", release]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert [tuple(r[:3]) for r in results] == list(product(MODULES, RECIPES, FORMATS))
    for *case, worst in results:
        assert worst < 1e-6, (case, worst)


@pytest.mark.parametrize(("kind", "dtype"), [("e4m3", "kFloat8E4M3"), ("e5m2", "kFloat8E5M2")])
def test_every_value_of_a_format(kind: str, dtype: str) -> None:
    """The reference's rounding by exponents is torch's cast: every value, the middle of every pair, and beyond."""
    name = kernels_quantize.float8(DType[dtype])
    exact = torch.arange(256, dtype=torch.uint8).view(name).float()
    exact = exact[exact.isfinite()].sort().values
    middle = (exact[1:] + exact[:-1]) / 2
    x = torch.cat([exact, middle, middle * (1 + 2**-20), middle * (1 - 2**-20), torch.tensor([1e9, -1e9])])
    assert torch.equal(kernels_quantize.cast(x, torch.ones(()), name).view(name).float(), reference.rounded(x, kind))


def test_hand_worked_scales() -> None:
    """Of a tensor with magnitude 3, and without any."""
    amax = torch.tensor([3.0, 0.0, float("inf")])
    assert kernels_quantize.scale_of(amax, torch.float8_e4m3fn, False, 0.0).tolist() == pytest.approx([448 / 3, 1, 1])
    assert kernels_quantize.scale_of(amax, torch.float8_e4m3fn, True, 0.0).tolist() == [128, 1, 1]


def test_hand_worked_scales_of_mxfp8() -> None:
    """The least power of 2 that the magnitude over it fits the format; 448 is E4M3's largest value."""
    amax = torch.tensor([448.0, 449.0, 3.0, 2.0**-20, 0.0, float("inf")])
    stored = mxfp8_blocks.exponents(amax, torch.float8_e4m3fn)
    assert mxfp8_blocks.powers(stored).tolist() == [1, 2, 2**-7, 2**-28, 2**-127, 2.0**127]
    assert mxfp8_blocks.exponents(torch.tensor([57344.0, 3.0]), torch.float8_e5m2).tolist() == [127, 113]
    x = torch.zeros(64, 32)
    x[0, :2], x[32, 0] = torch.tensor([448.0, 0.3]), 28.0
    data, scales = mxfp8_blocks.quantize_side(x, torch.float8_e4m3fn, True)
    assert scales.shape == (4, 128) and scales[:2, :2].tolist() == [[127, 117], [123, 0]]
    assert data.view(torch.float8_e4m3fn).float()[[0, 0, 32], [0, 1, 0]].tolist() == [448, 320, 448]
    data, scales = mxfp8_blocks.quantize_side(x, torch.float8_e4m3fn, False)
    assert scales.shape == (128, 4) and scales[[0, 32, 1], 0].tolist() == [127, 123, 0]
    assert data.view(torch.float8_e4m3fn).float()[0, :2].tolist() == [448, 0.3125]


def test_hand_worked_history() -> None:
    """Three steps of a history of 3: the newest enters, the oldest leaves, scales follow the largest."""
    history, scale = torch.zeros(3, 1), torch.ones(1)
    seen = []
    for amax in (7.0, 14.0, 3.5, 1.75, 1.75):
        history[0] = amax
        kernels_quantize.fused_amax_and_scale_update_after_reduction(
            torch.tensor([amax]), [history], [scale], "max", DType["kFloat8E4M3"], 0
        )
        seen.append(float(scale))
        assert history[0] == 0 and history[-1] == amax
    assert seen == [64, 32, 32, 32, 128]
