"""The native engine on a GPU: both layer specs against Hugging Face, packing, FP8, and one checkpoint for both.

One process, one device. Run by `scripts/gpu_check.sh` or `pytest -m gpu`; without a GPU nothing here is collected as
passing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.cases import Case, global_batch
from tests.parity.models import build
from tests.parity.oracle import Oracle, Recipe
from tests.parity.test_prefix_sharing import collated, rollouts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
MODELS = ("dense", "llama3-rope", "mistral-window", "moe", "dense-tied")


@pytest.fixture(scope="module")
def context() -> Iterator[Any]:
    from megaswift.engine.megatron.parallel_context import ParallelContext
    from megaswift.parallel.layout import Layout

    made = ParallelContext(Layout(1))
    yield made
    made.close()


def engine_of(folder: Path, context: Any, **options: Any) -> Any:
    """An engine with the folder's weights."""
    from megaswift.config import SwiftConfig
    from megaswift.families import family_of
    from megaswift.run.engines import native_engine

    raw = json.loads((folder / "config.json").read_text())
    engine = native_engine(SwiftConfig(task="sft", model=str(folder), **options), family_of(raw).spec(raw), context)
    engine.load_hf(folder)
    return engine


def distance(gradients: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    """||g - truth|| / ||truth|| over all tensors together."""
    wrong = sum(float((gradients[n].float().cpu() - g).square().sum()) for n, g in truth.items())
    return (wrong / sum(float(g.square().sum()) for g in truth.values())) ** 0.5


def numbers(engine: Any, batches: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients by Hugging Face's names."""
    from megaswift.losses.sft import CrossEntropy

    loss = engine.accumulate(batches, CrossEntropy()).loss
    return loss, {n: t.clone() for n, t in engine.hf_gradients()}


def truth_of(folder: Path, batches: Any, dtype: torch.dtype = torch.float32) -> tuple[float, dict[str, torch.Tensor]]:
    """Hugging Face's, on the CPU."""
    oracle = Oracle(folder, Recipe())
    oracle.model = oracle.model.to(dtype)
    return oracle.accumulate(batches)[0], {n: g.float() for n, g in oracle.gradients().items()}


@pytest.mark.parametrize("variant", MODELS)
@pytest.mark.parametrize("packed", [False, True])
def test_torch_spec_in_float32(variant: str, packed: bool, tmp_path: Path, context: Any) -> None:
    """Plain torch kernels: float32 of another device, other summation orders."""
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = build(variant, tmp_path / variant)
    case = Case(model=variant, packed=packed)
    extra = {"moe_aux_loss_coeff": 0.0} if case.moe else {}
    engine = engine_of(folder, context, transformer_impl="torch", torch_dtype="float32", **extra)
    loss, gradients = numbers(engine, global_batch(case, 2))
    want, truth = truth_of(folder, global_batch(replace(case, packed=False), 2))
    assert loss == pytest.approx(want, rel=1e-5)
    assert distance(gradients, truth) < 1e-4


@pytest.mark.parametrize("variant", MODELS)
@pytest.mark.parametrize("packed", [False, True])
def test_transformer_engine_in_bfloat16(variant: str, packed: bool, tmp_path: Path, context: Any) -> None:
    """Fused kernels: within the spread that Hugging Face shows between bfloat16 and float32."""
    pytest.importorskip("transformer_engine")
    folder = build(variant, tmp_path / variant)
    case = Case(model=variant, packed=packed)
    extra = {"moe_aux_loss_coeff": 0.0} if case.moe else {}
    engine = engine_of(folder, context, transformer_impl="transformer_engine", torch_dtype="bfloat16", **extra)
    loss, gradients = numbers(engine, global_batch(case, 2))
    rows = global_batch(replace(case, packed=False), 2)
    (want, truth), (rough, theirs) = truth_of(folder, rows), truth_of(folder, rows, torch.bfloat16)
    assert distance(gradients, truth) <= 1.5 * distance(theirs, truth)
    assert abs(loss - want) <= 1.5 * max(abs(rough - want), 2e-3 * want)


@pytest.mark.parametrize("implementation", ["transformer_engine", "torch"])
def test_torch_products_of_experts(implementation: str, tmp_path: Path, context: Any) -> None:
    """Within the same spread; from compute capability 9.0 on, no layer of experts waits for the numbers of tokens."""
    if implementation == "transformer_engine":
        pytest.importorskip("transformer_engine")
    folder, case = build("moe", tmp_path / "moe"), Case(model="moe", packed=True)
    extra = {"moe_aux_loss_coeff": 0.0, "moe_grouped_gemm_impl": "torch"}
    engine = engine_of(folder, context, transformer_impl=implementation, torch_dtype="bfloat16", **extra)
    loss, gradients = numbers(engine, global_batch(case, 2))
    rows = global_batch(replace(case, packed=False), 2)
    (want, truth), (rough, theirs) = truth_of(folder, rows), truth_of(folder, rows, torch.bfloat16)
    assert distance(gradients, truth) <= 1.5 * distance(theirs, truth)
    assert abs(loss - want) <= 1.5 * max(abs(rough - want), 2e-3 * want)
    layer = engine.plain[0].decoder.layers[0].mlp
    x = torch.randn(64, 1, engine.plain[0].config.hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer(x)[0].sum().backward()  # what is waited for once
    torch.cuda.set_sync_debug_mode("error" if torch.cuda.get_device_capability() >= (9, 0) else "default")
    try:
        layer(x)[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("variant", ["dense", "mistral-window"])
@pytest.mark.parametrize("implementation", ["transformer_engine", "torch"])
def test_shared_prompts_in_bfloat16(variant: str, implementation: str, tmp_path: Path, context: Any) -> None:
    """Documents that attend to a prefix of another one: more keys than queries, the mask aligned at their ends."""
    if implementation == "transformer_engine":
        pytest.importorskip("transformer_engine")
    folder, case = build(variant, tmp_path / variant), Case(model=variant, packed=True)
    shared, apart = (collated(rollouts(2, 0), case, on) for on in (True, False))
    assert all(batch.prefixes is not None for batch in shared)
    engine = engine_of(folder, context, transformer_impl=implementation, torch_dtype="bfloat16", packing=True)
    loss, gradients = numbers(engine, shared)
    (want, truth), (rough, theirs) = truth_of(folder, apart), truth_of(folder, apart, torch.bfloat16)
    assert distance(gradients, truth) <= 1.5 * distance(theirs, truth)
    assert abs(loss - want) <= 1.5 * max(abs(rough - want), 2e-3 * want)


def test_one_checkpoint_for_both_specs(tmp_path: Path, context: Any) -> None:
    """Saved by the fused spec, loaded by the plain one: every weight bit by bit."""
    pytest.importorskip("transformer_engine")
    from megaswift.losses.sft import CrossEntropy

    folder = build("moe", tmp_path / "moe")
    fused = engine_of(folder, context, transformer_impl="transformer_engine", torch_dtype="bfloat16")
    fused.train_batch(global_batch(Case(model="moe"), 2), CrossEntropy(), 1e-3)
    fused.save(tmp_path / "saved")
    plain = engine_of(folder, context, transformer_impl="torch", torch_dtype="bfloat16")
    plain.load(tmp_path / "saved")
    want = dict(fused.hf_weights())
    got = dict(plain.hf_weights())
    assert want.keys() == got.keys()
    assert [n for n in want if not torch.equal(want[n], got[n])] == []


def test_fp8_trains(tmp_path: Path, context: Any) -> None:
    """FP8 products: the loss stays near bfloat16's and falls."""
    pytest.importorskip("transformer_engine")
    from megaswift.losses.sft import CrossEntropy

    folder = build("dense", tmp_path / "dense")
    batches = global_batch(Case(model="dense", packed=True), 2)
    exact = engine_of(folder, context, torch_dtype="bfloat16").evaluate(batches, CrossEntropy()).loss
    engine = engine_of(folder, context, torch_dtype="bfloat16", fp8_format="hybrid", fp8_recipe="tensorwise")
    losses = [engine.train_batch(batches, CrossEntropy(), 1e-3).loss for _ in range(5)]
    assert losses[0] == pytest.approx(exact, rel=0.1)
    assert losses[-1] < losses[0]


def test_moments_on_the_host(tmp_path: Path, context: Any) -> None:
    """The ordinary optimizer's course, with eight bytes a parameter less on the GPU."""
    from megaswift.engine.megatron.optim.optimizer import optimizer_parts
    from megaswift.losses.sft import CrossEntropy

    folder = build("dense", tmp_path / "dense")
    batches = global_batch(Case(model="dense", packed=True), 2)
    plain, ours = (engine_of(folder, context, torch_dtype="bfloat16", optimizer_cpu_offload=on) for on in (False, True))
    losses = [[engine.train_batch(batches, CrossEntropy(), 1e-3).loss for _ in range(4)] for engine in (plain, ours)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2) and losses[1][-1] < losses[1][0]
    trained = sum(p.numel() for chunk in ours.plain for p in chunk.parameters())
    assert plain.report().optimizer_bytes - ours.report().optimizer_bytes == 8 * trained
    ours.save(tmp_path / "saved")
    for engine in (plain, ours):
        engine.load(tmp_path / "saved")
    states = [state for part in optimizer_parts(ours.optimizer) for state in part.optimizer.state.values()]
    assert states and {t.device.type for state in states for t in state.values()} == {"cpu"}
    want = dict(ours.hf_weights())
    assert [n for n, t in plain.hf_weights() if not torch.equal(t, want[n])] == []
