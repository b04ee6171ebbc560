"""Weights kept in FP8 beside the same runs with 16-bit weights, whose products quantize them: the same numbers.

Covers: megaswift/engine/megatron/optim/fp8_weights.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megaswift.bridge.weight_source import open_weights
from tests.engine.checkpoint_worker import Result, Run
from tests.parity.cases import ROW, parse
from tests.parity.measure import Task
from tests.parity.models import build as build_model
from tests.parity.oracle import Reference
from tests.parity.pool import Pool, shared
from tests.parity.references import References
from tests.te import resume_ranks
from tests.te.sources import RELEASES

pytestmark = pytest.mark.process
QUICK = {("blockwise", "moe te dp2 ep2 do")}
"""Of the default run; `test_state_bytes` and `test_fp8` have the other recipes there."""
LAYOUTS = (
    "dense te do",
    "dense te dp2 do overlap",
    "dense te tp2 sp dp2 do",
    "dense te pp2 vpp2 dp2 do",
    "dense te cp2 do comm=p2p recompute=full",
    "moe te dp2 ep2 do",
    "moe-nf4 te tp2 sp dp2 ep2 etp2 do",
)
WIDE = ("llama-fp8 te tp2 sp dp2 do", "llama-fp8 te tp2 sp dp2 do overlap", "moe-fp8 te tp2 sp dp2 ep2 etp2 do")
"""Sequence-parallel ranks gather whole quantized blocks of 128 tokens and channels."""
CASES = [
    *(("tensorwise", text) for text in LAYOUTS),
    *(("blockwise", text) for text in (*(w for w in LAYOUTS if " sp" not in w), *WIDE)),
]


def options(recipe: str, kept: bool) -> dict[str, Any]:
    """Of a run with FP8 products."""
    return {"torch_dtype": "bfloat16", "fp8_format": "hybrid", "fp8_recipe": recipe, "fp8_param_gather": kept}


def record_squares() -> list[float]:
    """From here on, for each norm, the sum of the squares of this rank's gradients, in float64 (on the ranks)."""
    from megatron.core.optimizer import MegatronOptimizer

    from megaswift.engine.megatron.optim.optimizer import NORM_GRADIENTS

    found: list[float] = []
    gradients = getattr(MegatronOptimizer, NORM_GRADIENTS)

    def also_add(optimizer: Any) -> Any:
        own = gradients(optimizer)
        found.append(sum(float(gradient.double().square().sum()) for gradient in own))
        return own

    setattr(MegatronOptimizer, NORM_GRADIENTS, also_add)
    return found


@dataclass(frozen=True)
class Norms:
    """Of each step, and the squares of all ranks' gradients, in float64."""

    norms: list[float | None]
    squares: list[float]


def assert_same_norms(got: Norms, want: Norms) -> None:
    """Squares of all gradients have the same sum. Norms are up to 1e-7 apart: FP8 weights have buffers of their own, so
    that ranks have other gradients, and Megatron-Core adds up the ranks' sums in float32."""
    assert got.squares == pytest.approx(want.squares, rel=1e-12)
    assert got.norms == pytest.approx(want.norms, rel=1e-7)


def train_and_export(rank: int, world: int, task: Task) -> tuple[Reference | None, list[float]]:
    """`measure.train` with weights read before each step, and an export by all ranks to `task.folder / "out"` (on the
    ranks)."""
    from megaswift.engine.megatron.engine import MegatronEngine
    from tests.parity import deferred, measure

    weights, step = MegatronEngine.hf_weights, MegatronEngine.train_batch

    def also_read(engine: MegatronEngine, *args: Any) -> Any:
        assert all(bool(weight.isfinite().all()) for _, weight in weights(engine))
        return step(engine, *args)

    def also_export(engine: MegatronEngine, *args: Any) -> Any:
        engine.export(task.folder / "out", task.folder)
        return weights(engine, *args)

    MegatronEngine.hf_weights, MegatronEngine.train_batch = also_export, also_read  # type: ignore[method-assign]
    squares = record_squares()
    with deferred.installed() if task.case.overlap else nullcontext():
        return measure.train(rank, world, task), squares


def numbers(ranks: list[tuple[Any, list[float]]]) -> tuple[Any, Norms]:
    """Rank 0's result, and the norms."""
    (result, _), *_ = ranks
    return result, Norms(result.norms, [sum(parts) for parts in zip(*(own for _, own in ranks), strict=True)])


def compare(recipe: str, text: str, pool: Pool, references: References) -> None:
    """Gradients, three steps and weights, bit for bit."""
    case = parse(text)
    folder, optimizer, _ = references.of(case)
    job, row = "tests.parity.test_fp8_weights:train_and_export", 256 if text in WIDE else ROW
    (want, before), (got, after) = (
        numbers(pool.run(job, Task(case, folder, optimizer, options=options(recipe, kept), row=row), case.world))
        for kept in (False, True)
    )
    assert (got.loss, got.losses) == (want.loss, want.losses)
    assert_same_norms(after, before)
    exported = load_file(folder / "out" / "model.safetensors")
    for name, weight in want.weights.items():
        assert torch.equal(got.gradients[name], want.gradients[name]), name
        assert torch.equal(got.weights[name], weight) and torch.equal(exported[name].float(), weight), name


@pytest.mark.parametrize(
    ("recipe", "text"), [c if c in QUICK else pytest.param(*c, marks=pytest.mark.slow) for c in CASES]
)
def test_as_with_16_bit_weights(recipe: str, text: str, te_pool: Pool, references: References) -> None:
    """A weight's scales are those of its values, whenever it is quantized."""
    compare(recipe, text, te_pool, references)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "text"), [("tensorwise", "dense te dp2 do"), ("blockwise", WIDE[0])])
def test_the_newest_release(recipe: str, text: str, references: References) -> None:
    """Other sources of Transformer Engine."""
    compare(recipe, text, shared(RELEASES[-1]), references)


def resume(rank: int, world: int, run: Run) -> tuple[Result, list[float]]:
    """A run of the resume tests (on the ranks)."""
    squares = record_squares()
    return resume_ranks.job(rank, world, run), squares


def go(pool: Pool, folder: Path, recipe: str, kept: bool, **changes: Any) -> tuple[Result, Norms]:
    """Rank 0's result of a run of four ranks, each with one micro-batch a step."""
    case = parse("dense te dp4 do")
    run = Run(case, build_model("dense", folder / "model"), options=options(recipe, kept))
    result, norms = numbers(pool.run("tests.parity.test_fp8_weights:resume", replace(run, **changes), case.world))
    assert not result.error, result.error
    return result, norms


def test_delayed_scaling(te_pool: Pool, tmp_path: Path) -> None:
    """From one checkpoint, with scales of the weights' own, both kinds of runs take the same steps: with one
    micro-batch a step, 16-bit weights are quantized by the same scales. The checkpoint has the exact weights."""
    start, _ = go(te_pool, tmp_path, "delayed", True, save=tmp_path / "start")
    source = open_weights(tmp_path / "model")
    for name, weight in start.weights.items():
        assert torch.equal(weight, source.slice(name).bfloat16()), name
    histories = load_file(tmp_path / "start" / "fp8-00000.safetensors")
    name = "decoder.layers.0.mlp.linear_fc2"
    largest = source.slice("model.layers.0.mlp.down_proj.weight").bfloat16().abs().max().float()
    assert histories[f"{name}/scaling_fwd/scale"][1] == 448 / largest
    (kept, after), (plain, before) = (
        go(te_pool, tmp_path, "delayed", k, load=tmp_path / "start", last=3) for k in (True, False)
    )
    assert kept.losses == plain.losses
    assert_same_norms(after, before)
    for name, weight in plain.weights.items():
        assert torch.equal(kept.weights[name], weight), name


@pytest.mark.slow  # tests/te/test_resume.py is in the default run
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_resume(recipe: str, te_pool: Pool, tmp_path: Path) -> None:
    """Two steps, a checkpoint, two more steps: another process takes the same two."""
    saved, _ = go(te_pool, tmp_path, recipe, True, last=2, save=tmp_path / "step", extra=2)
    resumed, _ = go(te_pool, tmp_path, recipe, True, load=tmp_path / "step", first=2, last=4)
    assert (resumed.losses, resumed.norms, resumed.step) == (saved.losses[2:], saved.norms[2:], 4)
    read, _ = go(te_pool, tmp_path, recipe, False, load=tmp_path / "step")
    for name, weight in saved.weights.items():
        assert torch.equal(read.weights[name], weight), name
