"""Bytes of transformers' layers on the torch engines against those of real steps.

Covers: megaswift/memory/torch_activations.py, megaswift/memory/torch_estimate.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaswift.memory.activation_bytes import BATCH
from megaswift.memory.estimate import TrainedModel
from megaswift.memory.microbatch_setup import TORCH, ComputeKernels, MicrobatchSetup
from megaswift.memory.torch_activations import TorchSetup, kept_by_torch_layer
from megaswift.memory.torch_estimate import TorchRun
from megaswift.run.checks.fit import step_options
from tests.memory.counted_ranks import CONFIG, CountedRun, model_folder
from tests.memory.of_config import parts_of
from tests.memory.test_head_bytes import MODEL
from tests.parity.pool import Pool
from tests.planner.questions import run_of, spec_of

LLAMA = {**CONFIG, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
MODELS = {"qwen3": CONFIG, "llama": LLAMA, "wide": MODEL}
ROWS: dict[str, Any] = {"max_length": 64, "per_device_train_batch_size": 2}
HALF: dict[str, Any] = {"torch_dtype": "bfloat16"}
LORA: dict[str, Any] = {"train_type": "lora", "lora_rank": 4, "lora_dropout": 0.0}
FULL: dict[str, Any] = {"recompute_granularity": "full"}
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memory-models")


@pytest.fixture(scope="module", autouse=True)
def on_a_cpu() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        yield


def setup_of(run: CountedRun) -> TorchSetup:
    cfg, spec, layout = run.setup()
    kernels = ComputeKernels(TORCH, TORCH, cfg.model.torch_dtype, False)
    setup = MicrobatchSetup(step_options(cfg, layout.dp), spec, layout, kernels, parts_of(cfg, spec))
    return TorchSetup(setup, cfg.engine.engine)


def kept(one: TorchSetup) -> int:
    """All layers, the final norm and the head, by the parts of the estimate."""
    s = one.setup
    t, h, r = s.tokens, s.spec.hidden_size, one.residual_width
    layers = sum(sum(kept_by_torch_layer(one, i).values()) for i in range(s.spec.num_layers))
    if s.options.model.recompute_granularity == "full":
        layers = s.spec.num_layers * t * h * r
    else:
        layers += 2 * s.positions * s.spec.rotated_width * r
    full = s.parts.full
    final = t * h * (4 + (r if full else 0)) + 4 * t
    head = t * s.spec.vocab_size * s.width + (t * h * s.width if full else 0)
    cast = s.width * s.spec.vocab_size * h if one.autocast else 0
    return layers + final + head + cast + BATCH * t


@pytest.mark.process
@pytest.mark.parametrize(
    ("model", "text", "options"),
    [
        ("qwen3", "single", {"engine": "ddp", **HALF}),
        ("llama", "single", {"engine": "ddp", "torch_dtype": "float32"}),
        *(
            pytest.param(model, text, options, marks=SLOW)
            for model, text, options in (
                ("llama", "single", {"engine": "ddp", **HALF}),
                ("qwen3", "single", {"engine": "ddp", "torch_dtype": "float32"}),
                ("qwen3", "single", {"engine": "ddp", **HALF, **FULL}),
                ("qwen3", "single", {"engine": "ddp", **HALF, **LORA}),
                ("llama", "single", {"engine": "ddp", **HALF, **LORA, "lora_dropout": 0.1}),
                ("llama", "single", {"engine": "ddp", **HALF, **LORA, "target_modules": ("q_proj", "v_proj")}),
                ("qwen3", "dp2", {"engine": "ddp", **HALF}),
                ("qwen3", "dp2", {"engine": "zero1", **HALF}),
                ("qwen3", "dp2", {"engine": "zero2", **HALF}),
                ("llama", "dp2", {"engine": "zero2", **HALF, **FULL}),
                ("llama", "dp2", {"engine": "zero2", **HALF, **LORA}),
                ("qwen3", "dp2", {"engine": "fsdp2", "torch_dtype": "float32", **FULL}),
                ("llama", "dp2", {"engine": "fsdp2", **HALF, **FULL}),
            )
        ),
    ],
    ids=str,
)
def test_kept_tensors(model: str, text: str, options: dict[str, Any], pool: Pool, folders: Path) -> None:
    """Within a hundredth."""
    run = CountedRun(text, model_folder(folders / model, MODELS[model]), ROWS | options)
    for counted in pool.run("tests.memory.counted_torch:count_torch_kept", run, run.world):
        assert counted == pytest.approx(kept(setup_of(run)), rel=0.01)


@SLOW
@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("single", {"engine": "ddp", **HALF}),
        ("single", {"engine": "ddp", **HALF, **FULL}),
        ("single", {"engine": "ddp", "torch_dtype": "float32"}),
        ("single", {"engine": "ddp", **HALF, **LORA}),
        ("dp2", {"engine": "ddp", **HALF}),
    ],
    ids=str,
)
def test_peaks(text: str, options: dict[str, Any], pool: Pool, folders: Path) -> None:
    """Allocations of the second of two micro-batches, gradients included: of DDP those outside of its buckets. Peaks of
    ZeRO and FSDP2 cannot be counted on a CPU: gloo's threads copy what they reduce, when they come to it."""
    run = CountedRun(text, model_folder(folders / "wide", MODEL), ROWS | {"max_length": 256} | options)
    counted = pool.run("tests.memory.counted_torch:count_torch_peak", run, run.world)
    cfg, spec, _ = run.setup()
    kernels = ComputeKernels(TORCH, TORCH, cfg.model.torch_dtype, False)
    model = TrainedModel.of(cfg.model, cfg.lora, spec, kernels)
    estimate = TorchRun(model, cfg.engine.engine, run.world).estimate(replace(step_options(cfg, run.world), passes=1))
    assert estimate.activations.total + estimate.held.gradients == pytest.approx(max(counted), rel=0.05)


def test_gradients_of_ddp_outside_of_its_buckets() -> None:
    """With several micro-batches on several ranks a second copy."""
    cfg = run_of("qwen3-8b", engine="ddp")
    run = TrainedModel.of(cfg.model, cfg.lora, spec_of("qwen3-8b"), ComputeKernels(TORCH, TORCH, "bfloat16", True))
    one, two = (
        TorchRun(run, "ddp", ranks).estimate(replace(step_options(cfg, 1), passes=2)).held.gradients for ranks in (1, 2)
    )
    assert two == 2 * one == 8 * 8190735360
