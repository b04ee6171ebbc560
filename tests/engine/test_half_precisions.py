"""Checkpoints of half-precision runs over the optimizers: they resume bit for bit, and between bfloat16 and float16
main weights stay what they are and every data-parallel rank has them rounded once.

Covers: megaswift/engine/megatron/checkpoint/save_load.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megaswift.bridge.checkpoint.hf_metadata import write_checkpoint_hf_metadata
from megaswift.bridge.weight_source import open_weights
from tests.bridge.folders import plan_of
from tests.engine import checkpoint_worker, fused_adam
from tests.engine.checkpoint_worker import Result, Run
from tests.parity.cases import parse
from tests.parity.models import build as build_model
from tests.parity.pool import Pool

pytestmark = pytest.mark.process
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {},
    "host": {"optimizer_cpu_offload": True},
    "aware": {"precision_aware_optimizer": True},
}
HALVES = ("bfloat16", "float16")
JOB = "tests.engine.test_half_precisions:job"


def job(rank: int, world: int, run: Run) -> Any:
    """A run on its ranks, with float16 allowed on a CPU; `moments["own"]` has each rank's own weights."""
    from megaswift.engine.megatron import engine, transformer_config

    snapshot = fused_adam.snapshot

    def more(engine: Any, result: Result) -> None:
        snapshot(engine, result)
        result.moments["own"] = {p.entry.megatron: p.tensor.detach().clone() for p in engine.weights.placed}

    def asked(torch_dtype: str, spec: Any, cuda: bool) -> Any:
        return transformer_config.DTYPES[torch_dtype]

    aware = run.options.get("precision_aware_optimizer")
    with patch.object(transformer_config, "compute_dtype", asked), patch.object(fused_adam, "snapshot", more):
        assert engine is not None
        if not run.case.do:
            return checkpoint_worker.job(rank, world, run)
        return (fused_adam.job if aware else fused_adam.plain_job)(rank, world, run)


def go(pool: Pool, kind: str, dtype: str, tmp_path: Path, **changes: Any) -> list[Result]:
    """All ranks' results of a run with these optimizer and dtype."""
    case = parse("dense dp2 do")
    run = Run(case, build_model("dense", tmp_path / "model"), options={"torch_dtype": dtype, **OPTIMIZERS[kind]})
    results = pool.run(JOB, replace(run, **changes), case.world)
    assert not results[0].error, results[0].error
    return results


def ties(main: Tensor) -> Tensor:
    """Where float32 is halfway between two bfloat16: kernels that keep the low 16 bits round such a weight up, and a
    weight that was rounded down has a main weight one unit lower."""
    return (main.view(torch.int32) & 0xFFFF) == 0x8000


def rounded_once(results: list[Result], dtype: str) -> None:
    """Weights are the main weights' nearest in the run's dtype, the same on every rank."""
    first, *others = results
    for name, main in first.moments["main"].items():
        assert ((main.to(getattr(torch, dtype)) == first.weights[name]) | ties(main)).all(), name
    for name, weight in first.moments["own"].items():
        assert all(torch.equal(other.moments["own"][name], weight) for other in others), name


def same_states(read: Result, saved: Result) -> None:
    """Moments and main weights bit for bit, but for the unit of a tie."""
    for state in ("exp_avg", "exp_avg_sq"):
        for name, want in saved.moments[state].items():
            assert torch.equal(read.moments[state][name], want), (state, name)
    for name, want in saved.moments["main"].items():
        apart = read.moments["main"][name].view(torch.int32).long() - want.view(torch.int32).long()
        assert apart.abs().max() <= 1 and not apart[~ties(want)].any(), name


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("adam", "bfloat16"),
        ("aware", "bfloat16"),
        *(pytest.param(k, d, marks=pytest.mark.slow) for k, d in [("host", "bfloat16"), ("aware", "float16")]),
    ],
)
def test_main_weights_of_a_float32_folder(kind: str, dtype: str, pool: Pool, tmp_path: Path) -> None:
    """They are the file's values, not those rounded to 16 bits."""
    read = go(pool, kind, dtype, tmp_path, save=tmp_path / "step")
    rounded_once(read, dtype)
    source, away = open_weights(tmp_path / "model"), 0
    for name, main in read[0].moments["main"].items():
        want = source.slice(name)
        apart = (main.view(torch.int32).long() - want.view(torch.int32).long()).abs()
        assert apart.max() <= 1 and not apart[~ties(want)].any(), name
        away += int((want != want.to(getattr(torch, dtype)).float()).sum())
    assert away > 10_000


QUICK = [("adam", *HALVES), ("aware", *reversed(HALVES))]
CASES = [(kind, a, b) for kind in OPTIMIZERS for a in HALVES for b in HALVES]


@pytest.mark.parametrize(
    ("kind", "saved", "loaded"), [c if c in QUICK else pytest.param(*c, marks=pytest.mark.slow) for c in CASES]
)
def test_another_half_precision(kind: str, saved: str, loaded: str, pool: Pool, tmp_path: Path) -> None:
    first = go(pool, kind, saved, tmp_path, last=2, save=tmp_path / "step", extra=2)
    rounded_once(first, saved)
    read = go(pool, kind, loaded, tmp_path, load=tmp_path / "step", first=2, last=2 + 2 * (saved == loaded))
    if saved == loaded:
        assert (read[0].losses, read[0].norms, read[0].step) == (first[0].losses[2:], first[0].norms[2:], 4)
        read = go(pool, kind, loaded, tmp_path, load=tmp_path / "step")
    rounded_once(read, loaded)
    same_states(read[0], first[0])
    assert any(not torch.equal(t.bfloat16().float(), t) for t in first[0].moments["main"].values())


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "loaded"), [(a, b) for a in OPTIMIZERS for b in OPTIMIZERS if a != b])
def test_another_optimizer(saved: str, loaded: str, pool: Pool, tmp_path: Path) -> None:
    """Any of them reads what another one wrote."""
    first = go(pool, saved, "float16", tmp_path, last=2, save=tmp_path / "step")
    read = go(pool, loaded, "bfloat16", tmp_path, load=tmp_path / "step")
    rounded_once(read, "bfloat16")
    same_states(read[0], first[0])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize(("saved", "loaded"), [HALVES, HALVES[::-1]])
def test_without_the_distributed_optimizer(optimizer: str, saved: str, loaded: str, pool: Pool, tmp_path: Path) -> None:
    """Against the float32 weights in the checkpoint's files."""
    case, folder = parse("dense dp2"), build_model("dense", tmp_path / "hf")
    run = Run(case, folder, options={"torch_dtype": saved, "optimizer": optimizer}, last=2, save=tmp_path / "engine")
    pool.run(JOB, run, case.world)
    plan = plan_of(folder)
    write_checkpoint_hf_metadata(
        tmp_path / "model", plan.spec.hf_config, dict.fromkeys(plan.hf_shapes, torch.bfloat16), folder
    )
    main = open_weights(tmp_path, torch.float32)
    options = {"torch_dtype": loaded, "optimizer": optimizer}
    read = pool.run(JOB, Run(case, folder, options=options, load=tmp_path / "engine"), case.world)[0]
    for name, weight in read.weights.items():
        assert torch.equal(weight, main.slice(name).to(getattr(torch, loaded))), name
    assert any(not torch.equal(t.to(getattr(torch, saved)).float(), t) for t in map(main.slice, read.weights))
