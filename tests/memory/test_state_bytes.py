"""Bytes of weights, gradients and optimizer states against what real runs hold after a step.

Covers: megaswift/memory/state_bytes.py, megaswift/memory/rank_parameters.py, megaswift/memory/torch_states.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megaswift.config import SwiftConfig
from megaswift.families import family_of
from megaswift.memory.rank_parameters import parameters_by_place
from megaswift.memory.state_bytes import HeldBytes, held_bytes
from megaswift.memory.torch_states import (
    state_bytes,
    torch_engine_bytes,
    torch_parameters,
)
from megaswift.parallel.layout import Layout
from megaswift.parallel.pipeline_split import PipelineSplit, model_chunks_by_stage
from megaswift.run.checks.fit import step_options
from tests.memory.counted_ranks import CONFIG, MOE, CountedRun, Held, model_folder
from tests.memory.of_config import parts_of
from tests.parity.models import build
from tests.parity.pool import Pool

HALF: dict[str, Any] = {"torch_dtype": "bfloat16"}
LORA: dict[str, Any] = {**HALF, "train_type": "lora", "lora_rank": 4}
LAYOUT = Layout(1)
MODELS = {"dense": CONFIG, "tied": {**CONFIG, "tie_word_embeddings": True}, "moe": MOE}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memory-models")


def computed(run: CountedRun) -> list[HeldBytes]:
    """Of the first rank of each pipeline stage."""
    cfg, spec, layout = run.setup()
    parts = parts_of(cfg, spec)
    dtype = cfg.model.torch_dtype
    if cfg.engine.engine != "megatron":
        parameters, offload = torch_parameters(spec, parts), "offload" in cfg.engine.fsdp
        return [torch_engine_bytes(cfg.engine.engine, cfg.optim, dtype, run.world, parameters, offload)]
    stages = model_chunks_by_stage(spec.num_layers, layout, PipelineSplit.from_config(cfg.parallel))
    places = parameters_by_place(spec, parts, layout, False)
    return [
        held_bytes(step_options(cfg, layout.dp), dtype, layout, [places.of_chunk(chunk) for chunk in chunks])
        for chunks in stages
    ]


def counted(run: CountedRun, pool: Pool) -> list[Held]:
    ranks: list[Held] = pool.run("tests.memory.counted_ranks:count_held", run, run.world)
    return ranks


def held(stage: HeldBytes) -> Held:
    return Held(stage.weights, stage.gradients, stage.optimizer, stage.fp8_copies)


@pytest.mark.process
@pytest.mark.parametrize(
    ("model", "text", "options"),
    [
        ("dense", "single", {"optimizer": "sgd", "sgd_momentum": 0.0}),
        ("dense", "dp2", HALF),
        ("dense", "dp2 do", HALF),
        ("dense", "tp2 sp", {}),
        ("tied", "pp2 vpp2", HALF),
        ("tied", "pp2 dp2 do", HALF),
        ("moe", "dp2 ep2 do", HALF),
        ("dense", "dp2 do", {**LORA, "modules_to_save": ("lm_head",)}),
        ("dense", "tp2 sp", {**LORA, "train_type": "qlora"}),
        ("dense", "single", {**HALF, "freeze_parameters": (r"layers\.[01]\.",)}),
        ("dense", "single", {**HALF, "freeze_parameters": (".",), "trainable_parameters": (r"layers\.[01]\.",)}),
        ("dense", "dp2", {"engine": "ddp"}),
        ("dense", "dp2", {"engine": "ddp", "train_type": "lora", "optimizer": "adafactor"}),
        ("dense", "dp2", {"engine": "fsdp2"}),
        pytest.param("dense", "dp2", {"engine": "zero2"}, marks=pytest.mark.slow),
        pytest.param("dense", "dp2", {"engine": "zero2", **HALF}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_bytes_are_those_of_a_run(model: str, text: str, options: dict[str, Any], pool: Pool, folders: Path) -> None:
    """Storages, each once. Every rank of a stage holds as many: no size of this model needs padding."""
    run = CountedRun(text, model_folder(folders / model, MODELS[model]), options)
    ranks, stages = counted(run, pool), computed(run)
    per_stage = run.world // len(stages)
    assert ranks == [held(stage) for stage in stages for _ in range(per_stage)]


AWARE: dict[str, Any] = {**HALF, "precision_aware_optimizer": True}


@pytest.mark.process
@pytest.mark.parametrize(
    ("options", "per_parameter"),
    [
        (AWARE, 16),
        ({**AWARE, "recompute_granularity": "selective", "recompute_modules": ("mlp",)}, 16),
        ({**AWARE, "main_grads_dtype": "bf16"}, 14),
        ({**AWARE, "exp_avg_dtype": "bf16"}, 14),
        ({**AWARE, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "store_param_remainders": False}, 14),
    ],
    ids=str,
)
def test_bytes_under_the_precision_aware_optimizer(
    options: dict[str, Any], per_parameter: int, te_pool: Pool, folders: Path
) -> None:
    """With Transformer Engine's FusedAdam on the test device; on one rank, which holds everything."""
    run = CountedRun("dense do te", model_folder(folders / "dense", CONFIG), options)
    (rank,), (stage,) = counted(run, te_pool), computed(run)
    assert rank == held(stage)
    assert rank.weights + rank.gradients + rank.optimizer == per_parameter * rank.weights // 2


@pytest.mark.process
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("dense", {"fp8_recipe": "delayed"}),
        ("dense", {"fp8_recipe": "tensorwise", "precision_aware_optimizer": True, "main_grads_dtype": "bf16"}),
        ("dense", {"fp8_recipe": "blockwise"}),
        ("dense", {"fp8_recipe": "mxfp8"}),
        ("dense", {**LORA, "fp8_recipe": "tensorwise"}),
        ("moe", {"fp8_recipe": "tensorwise"}),
    ],
    ids=str,
)
def test_copies_of_weights_in_fp8(model: str, options: dict[str, Any], te_pool: Pool, folders: Path) -> None:
    """Of linear layers, trained or frozen, experts included: the weight and its transpose, a byte each; MXFP8's scales
    beside them. Embedding, head, router and adapters have none."""
    run = CountedRun(
        "dense do te", model_folder(folders / model, MODELS[model]), {**HALF, "fp8_format": "hybrid", **options}
    )
    (rank,), (stage,) = counted(run, te_pool), computed(run)
    assert rank == held(stage)
    linear = 4 * (128 * 512 + 256 * 128 + 3 * 128 * 256)  # in MODELS the experts together are as large as the MLP
    assert rank.fp8_copies == 2 * linear + (linear // 16 if options["fp8_recipe"] == "mxfp8" else 0)


@pytest.mark.process
@pytest.mark.parametrize(
    ("model", "text", "options"),
    [
        ("dense", "tp2 sp dp2 do", {"fp8_recipe": "tensorwise"}),
        ("dense", "do", {"fp8_recipe": "delayed"}),
        ("moe", "dp2 ep2 do", {"fp8_recipe": "blockwise"}),
    ],
    ids=str,
)
def test_weights_in_fp8(model: str, text: str, options: dict[str, Any], te_pool: Pool, folders: Path) -> None:
    """A byte for each, in buffers of their own, and one for the transpose; gradients and main weights in float32."""
    more = {**HALF, "fp8_format": "hybrid", "fp8_param_gather": True, **options}
    run = CountedRun(f"dense {text} te", model_folder(folders / model, MODELS[model]), more)
    ranks, (stage,) = counted(run, te_pool), computed(run)
    assert set(ranks) == {held(stage)}
    assert stage.fp8_copies and stage.weights < 2 * stage.fp8_copies


@pytest.mark.process
@pytest.mark.parametrize(
    "text", ["tp2 sp", *(pytest.param(text, marks=pytest.mark.slow) for text in ("single", "dp2 ep2", "pp2"))]
)
def test_latent_attention(text: str, pool: Pool, folders: Path) -> None:
    """Down projections lie whole on every tensor-parallel rank."""
    run = CountedRun(f"deepseek_v3 {text}", build("deepseek_v3", folders / "deepseek"), HALF)
    ranks, stages = counted(run, pool), computed(run)
    assert ranks == [held(stages[i * len(stages) // run.world]) for i in range(run.world)]


@pytest.mark.process
def test_padding_of_shards_counts(pool: Pool, folders: Path) -> None:
    """A model of odd sizes: weights and gradients exactly, of the states at most the padding of the buffer too much."""
    run = CountedRun("dense dp2 do", build("dense", folders / "odd"), HALF)
    ranks, (stage,) = counted(run, pool), computed(run)
    for rank in ranks:
        assert (rank.weights, rank.gradients) == (stage.weights, stage.gradients)
        assert 0 <= stage.optimizer - rank.optimizer <= 12 * 64 * 60
    assert sum(r.optimizer for r in ranks) == 12 * 189376


@pytest.mark.process
def test_offloaded_moments_are_in_host_memory(pool: Pool, folders: Path) -> None:
    """On a CPU both memories are one: 8 bytes an element move from the device's side to the host's, with the buffers of
    a step."""
    run = CountedRun("dense single", model_folder(folders / "dense", CONFIG), {**HALF, "optimizer_cpu_offload": True})
    (rank,), (stage,) = counted(run, pool), computed(run)
    elements = stage.gradients // 4
    assert rank.optimizer == 12 * elements
    assert stage.optimizer == 4 * elements and stage.host == 8 * elements + 2 * 8 * 128 * 512


def test_remainders_and_the_host_optimizer() -> None:
    """Bytes of a bfloat16 parameter on the device: 18, with remainders 16, with the host optimizer 10 (its moments on
    the host)."""
    config = {**CONFIG, "vocab_size": 256}
    spec = family_of(config).spec(config)

    def per_element(**options: Any) -> float:
        cfg = SwiftConfig(task="sft", **options)
        parts = parts_of(cfg, spec)
        [[chunk]] = model_chunks_by_stage(4, LAYOUT)
        parameters = parameters_by_place(spec, parts, LAYOUT, False).of_chunk(chunk)
        held = held_bytes(step_options(cfg, 1), "bfloat16", LAYOUT, [parameters])
        return held.device / (held.weights / 2)

    assert per_element() == 18
    assert per_element(precision_aware_optimizer=True) == 16
    assert per_element(precision_aware_optimizer=True, store_param_remainders=False) == 18
    assert per_element(precision_aware_optimizer=True, main_grads_dtype="bf16") == 14
    assert per_element(precision_aware_optimizer=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16") == 12
    assert per_element(optimizer_cpu_offload=True) == 10
    assert per_element(optimizer_cpu_offload=True, optimizer_offload_fraction=0.25) == 16
    assert per_element(optimizer="sgd") == 14


def test_adapters_of_grouped_experts_are_one_parameter_for_each_projection() -> None:
    """As many elements as one by one. The host optimizer's buffers have room for the largest parameter."""
    spec = family_of(MOE).spec(MOE)
    cfg = SwiftConfig(task="sft", train_type="lora", lora_rank=8, optimizer_cpu_offload=True)
    parts = parts_of(cfg, spec)
    [[chunk]] = model_chunks_by_stage(4, LAYOUT)
    grouped, single = (parameters_by_place(spec, parts, LAYOUT, on).of_chunk(chunk) for on in (True, False))
    adapters = [{p: n for p, n in each.items() if p.adapter and p.expert} for each in (grouped, single)]
    assert [sum(each.values()) for each in adapters] == [4 * 3 * 2, 4 * 3 * 2 * 4]
    elements = [sum(n * p.elements for p, n in each.items()) for each in adapters]
    assert elements == [4 * 4 * 3 * 8 * (128 + 64)] * 2
    hosts = [held_bytes(step_options(cfg, 1), "bfloat16", LAYOUT, [each]).host for each in (grouped, single)]
    assert hosts[0] - hosts[1] == 2 * 8 * (4 * 8 * 128 - 256 * 8)  # an A of four experts in place of the B of queries


def test_states_of_eight_bit_optimizers() -> None:
    """bitsandbytes' states of a matrix and of a vector below its smallest size."""
    cfg = SwiftConfig(task="sft", engine="ddp", optimizer="adamw_8bit")
    assert state_bytes(cfg.optim, (128, 64)) == 2 * (8192 + 4 * 32)
    assert state_bytes(cfg.optim, (1024,)) == 2 * 4 * 1024
    assert state_bytes(cfg.replace(optimizer="lion_8bit").optim, (128, 64)) == 8192 + 4 * 32
    assert state_bytes(cfg.replace(optimizer="adafactor").optim, (128, 64)) == 4 * (128 + 64)
