"""Save, load and resume on Transformer Engine's own FusedAdam: over optimizers, dtypes and layouts, bit for bit, and
from each kind of checkpoint to every other.

Covers: megaswift/engine/megatron/checkpoint/fp8_history.py, megaswift/engine/megatron/checkpoint/optimizer_states.py,
megaswift/engine/megatron/checkpoint/save_load.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.checkpoint_worker import Result, Run
from tests.parity.cases import ROW, parse
from tests.parity.models import build
from tests.parity.pool import Pool

pytestmark = pytest.mark.process
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {},
    "aware": {"precision_aware_optimizer": True},
    "host": {"optimizer_cpu_offload": True},
}
AWARE_KINDS: dict[str, dict[str, Any]] = {
    "bf16-grads": {"precision_aware_optimizer": True, "main_grads_dtype": "bf16"},
    "bf16-moments": {"precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    "whole-main": {"precision_aware_optimizer": True, "store_param_remainders": False},
}
"""Of bfloat16 weights with the distributed optimizer only."""
OPTIMIZERS |= AWARE_KINDS
LAYOUTS = (
    "dense do",
    "dense dp2 do",
    "dense dp2",
    "dense tp2 sp do",
    "dense pp2 vpp2 do",
    "moe dp2 ep2 do",
    "moe tp2 sp etp2 do",
)
DTYPES = ("float32", "bfloat16", "float16")
QUICK = (
    ("aware", "bfloat16", "dense dp2 do"),
    ("host", "bfloat16", "moe dp2 ep2 do"),
    ("bf16-moments", "bfloat16", "dense dp2 do"),
)


def possible(kind: str, dtype: str, layout: str) -> bool:
    """The precision-aware and the host's optimizer are distributed ones; main weights apart need 16 bits."""
    if kind in AWARE_KINDS and dtype != "bfloat16":
        return False
    return (kind == "adam" or " do" in layout) and (kind != "aware" or dtype != "float32")


CASES = [c for c in product(OPTIMIZERS, DTYPES, LAYOUTS) if possible(*c)]


def go(pool: Pool, kind: str, dtype: str, layout: str, folder: Path, **changes: Any) -> Result:
    """Rank 0's result."""
    case = replace(parse(layout), te=True)
    options = {"torch_dtype": dtype, **OPTIMIZERS[kind]}
    run = Run(case, build(case.variant, folder / "model"), options=options)
    result: Result = pool.run("tests.te.resume_ranks:job", replace(run, **changes), case.world)[0]
    return result


def same(a: Result, b: Result) -> None:
    """Weights and states, bit for bit."""
    for name, weight in a.weights.items():
        assert torch.equal(weight, b.weights[name]), name
    for kind, states in a.moments.items():
        for name, state in states.items():
            assert torch.equal(state, b.moments[kind][name]), (kind, name)


@pytest.mark.parametrize(
    ("kind", "dtype", "layout"), [c if c in QUICK else pytest.param(*c, marks=pytest.mark.slow) for c in CASES]
)
def test_resume(kind: str, dtype: str, layout: str, te_pool: Pool, tmp_path: Path) -> None:
    """Two steps, a checkpoint, two more steps: another process that reads the checkpoint takes the same two."""
    saved = go(te_pool, kind, dtype, layout, tmp_path, last=2, save=tmp_path / "step", extra=2)
    assert not saved.error and len(saved.losses) == 4
    resumed = go(te_pool, kind, dtype, layout, tmp_path, load=tmp_path / "step", first=2, last=4)
    assert not resumed.error, resumed.error
    assert (resumed.losses, resumed.norms, resumed.step) == (saved.losses[2:], saved.norms[2:], 4)
    read = go(te_pool, kind, dtype, layout, tmp_path, load=tmp_path / "step")
    same(read, saved)


WIDE = {"dense": "llama-fp8", "moe": "moe-fp8"}


def fp8_layout(recipe: str, layout: str) -> str:
    """With a model whose sizes fit: half an expert is a multiple of 16, and sequence-parallel ranks gather whole
    quantized blocks of 128."""
    model, *words = layout.split()
    if "sp" not in words:
        return layout
    wide = WIDE[model] if recipe == "blockwise" else model.replace("moe", "moe-nf4")
    return " ".join([wide, *words])


FP8_CASES = [
    (kind, recipe, fp8_layout(recipe, layout))
    for kind, recipe, layout in product(OPTIMIZERS, ("delayed", "tensorwise", "blockwise"), LAYOUTS)
    if possible(kind, "bfloat16", layout)
]


@pytest.mark.parametrize(
    ("kind", "recipe", "layout"),
    [c if c == ("adam", "delayed", "dense dp2 do") else pytest.param(*c, marks=pytest.mark.slow) for c in FP8_CASES],
)
def test_resume_in_fp8(kind: str, recipe: str, layout: str, te_pool: Pool, tmp_path: Path) -> None:
    """The same with FP8 products: delayed scaling goes on from the amaxes of the steps before."""
    fp8 = {"torch_dtype": "bfloat16", "fp8_format": "hybrid", "fp8_recipe": recipe, **OPTIMIZERS[kind]}
    common: dict[str, Any] = {"options": fp8, "row": 256 if "fp8" in layout else ROW}
    saved = go(te_pool, kind, "bfloat16", layout, tmp_path, last=2, save=tmp_path / "step", extra=2, **common)
    assert not saved.error, saved.error
    assert len(saved.losses) == 4
    resumed = go(te_pool, kind, "bfloat16", layout, tmp_path, load=tmp_path / "step", first=2, last=4, **common)
    assert not resumed.error, resumed.error
    assert (resumed.losses, resumed.norms) == (saved.losses[2:], saved.norms[2:])
    same(go(te_pool, kind, "bfloat16", layout, tmp_path, load=tmp_path / "step", **common), saved)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [("dense dp2 do", "dense tp2 sp do"), ("dense tp2 sp do", "dense do"), ("dense do", "dense pp2")],
)
def test_histories_under_another_layout(before: str, after: str, te_pool: Pool, tmp_path: Path) -> None:
    """Amaxes are those of all ranks that share a module: each module of another layout takes over its own."""
    fp8 = {"torch_dtype": "bfloat16", "fp8_format": "hybrid", "fp8_recipe": "delayed"}
    first, second = tmp_path / "first", tmp_path / "second"
    go(te_pool, "adam", "bfloat16", before, tmp_path, last=2, save=first, options=fp8)
    read = go(te_pool, "adam", "bfloat16", after, tmp_path, load=first, save=second, options=fp8)
    assert not read.error, read.error
    want = {name: t for file in first.glob("fp8-*") for name, t in load_file(file).items()}
    got = {name: t for file in second.glob("fp8-*") for name, t in load_file(file).items()}
    assert got.keys() == want.keys() and len(want) == 4 * 4 * 4, "layers x modules x tensors"
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name
    assert all(float(t.max()) > 1 for name, t in want.items() if name.endswith("scale")), "scales follow the amaxes"


@pytest.mark.slow
def test_a_missing_history_file(te_pool: Pool, tmp_path: Path) -> None:
    """Under the same layout a rank's own file is required; another rank's histories never stand in for it."""
    fp8 = {"torch_dtype": "bfloat16", "fp8_format": "hybrid", "fp8_recipe": "delayed"}
    go(te_pool, "adam", "bfloat16", "dense tp2", tmp_path, last=2, save=tmp_path / "step", options=fp8)
    (tmp_path / "step" / "fp8-00001.safetensors").unlink()
    read = go(te_pool, "adam", "bfloat16", "dense tp2", tmp_path, load=tmp_path / "step", options=fp8)
    assert "fp8-00001.safetensors" in read.error and "is missing" in read.error


ACROSS = [
    ((a, x), (b, y))
    for (a, x), (b, y) in product(product(OPTIMIZERS, DTYPES), repeat=2)
    if (a, x) != (b, y) and possible(a, x, " do") and possible(b, y, " do")
]
QUICK_ACROSS = (
    (("adam", "bfloat16"), ("aware", "bfloat16")),
    (("bf16-moments", "bfloat16"), ("aware", "bfloat16")),
)


@pytest.mark.parametrize(
    ("source", "target"),
    [c if c in QUICK_ACROSS else pytest.param(*c, marks=pytest.mark.slow) for c in ACROSS],
    ids=lambda c: "-".join(c),
)
def test_another_kind(source: tuple[str, str], target: tuple[str, str], te_pool: Pool, tmp_path: Path) -> None:
    """It reads the checkpoint, with the same moments (rounded once where its own are bfloat16), or refuses it and names
    what differs."""
    saved = go(te_pool, *source, "dense dp2 do", tmp_path, last=2, save=tmp_path / "step")
    read = go(te_pool, *target, "dense dp2 do", tmp_path, load=tmp_path / "step")
    if read.error:
        assert "dtype" in read.error or "optimizer" in read.error, read.error
        return
    for state in ("exp_avg", "exp_avg_sq"):
        for name, want in saved.moments[state].items():
            kept = want.bfloat16().float() if target[0] == "bf16-moments" else want
            assert torch.equal(read.moments[state][name], kept), (state, name)
