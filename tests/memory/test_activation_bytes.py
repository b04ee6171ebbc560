"""Bytes of activations against the tensors that autograd keeps in real passes, each storage once.

Covers: megaswift/memory/activation_bytes.py, megaswift/memory/layer_activations.py,
megaswift/memory/microbatch_setup.py, megaswift/memory/layer_passes.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megaswift.config import SwiftConfig
from megaswift.families import family_of
from megaswift.memory.activation_bytes import (
    ActivationBytes,
    activation_bytes,
    activation_moments,
    kept_by_chunk,
    last_stage_head,
    passes_in_flight,
    shared_angle_bytes,
)
from megaswift.memory.layer_activations import EXPERT_FC1, FC1, FC2, kept_by_layer, mask_bytes
from megaswift.memory.layer_passes import CORE, Operation, attention_operations, block_operations
from megaswift.memory.microbatch_setup import TORCH, TRANSFORMER_ENGINE, ComputeKernels, MicrobatchSetup
from megaswift.memory.rank_parameters import TrainedParts
from megaswift.parallel.layout import Layout
from megaswift.parallel.pipeline_split import PipelineSplit, model_chunks_by_stage
from megaswift.run.checks.fit import step_options
from tests.memory.counted_ranks import CONFIG, MOE, CountedRun, Saved, model_folder
from tests.memory.of_config import parts_of
from tests.parity.cases import parse
from tests.parity.models import build
from tests.parity.pool import Pool

TOLERANCE = 0.02
"""Of the formulas, stated in docs/memory.md."""
ROWS: dict[str, Any] = {"torch_dtype": "bfloat16", "max_length": 128, "per_device_train_batch_size": 2}
LORA: dict[str, Any] = {"train_type": "lora", "lora_rank": 4}
TE: dict[str, Any] = {"transformer_impl": "transformer_engine"}
MODELS = {"dense": CONFIG, "moe": MOE}


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def full(**options: Any) -> dict[str, Any]:
    return {"recompute_granularity": "full", **options}


def ungated(config: dict[str, Any]) -> MicrobatchSetup:
    """256 tokens of 16 bits on one rank, in a model whose MLPs have no gate."""
    family = family_of(config)
    spec = family.spec(config)
    spec = replace(spec, transformer={**spec.transformer, "gated_linear_unit": False})
    run = CountedRun("dense single", Path("model"), ROWS)
    case = parse(run.text)
    cfg = SwiftConfig(task="sft", model="model", **case.config(**ROWS))
    parts = TrainedParts.of(cfg.model, cfg.lora, family, spec)
    layout = Layout.from_config(cfg.parallel, case.world)
    return MicrobatchSetup(
        step_options(cfg, layout.dp), spec, layout, ComputeKernels(TORCH, TORCH, "bfloat16", False), parts
    )


def test_an_mlp_without_a_gate_keeps_what_autograd_keeps() -> None:
    """relu(x W1)^2 W2: its input, the rectified product and the square."""
    tokens, hidden, inner = 256, CONFIG["hidden_size"], CONFIG["intermediate_size"]
    rows = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    first = torch.randn(inner, hidden, dtype=torch.bfloat16, requires_grad=True)
    second = torch.randn(hidden, inner, dtype=torch.bfloat16, requires_grad=True)
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = F.linear(F.relu(F.linear(rows, first)).square(), second)
    weights = {weight.untyped_storage().data_ptr() for weight in (first, second)}
    counted = sum(size for pointer, size in saved.items() if pointer not in weights)
    kept = kept_by_layer(ungated(CONFIG), 0)
    computed_bytes = sum(kept[name] for name in ("mlp.linear_fc1 input", "inner", "mlp.linear_fc2 input"))
    assert out.requires_grad and computed_bytes == counted == 2 * tokens * (hidden + 2 * inner)


def test_memory_of_models_without_a_gate_by_hand() -> None:
    """Two experts a token: 512 rows of the inner width 64. The backward pass of a square holds the gradients before and
    after it, its power and twice that; that of the first product gradients of input, output and weight, with experts of
    all four weights; so does that of an MLP's second product."""
    assert kept_by_layer(ungated(MOE), 0)["inner"] == 2 * 512 * 64
    dense, experts = ({op.after: op.backward for op in block_operations(ungated(c), 0)} for c in (CONFIG, MOE))
    assert dense["inner"] == 2 * 256 * 4 * 256
    assert dense[f"{FC1} input", f"adapters of {FC1}"] == 2 * (256 * (256 + 128) + 128 * 256)
    assert dense[f"{FC2} input", f"adapters of {FC2}"] == 2 * (256 * (128 + 256) + 128 * 256)
    assert experts["inner"] == 2 * 512 * 4 * 64
    assert experts[f"{EXPERT_FC1} input", f"adapters of {EXPERT_FC1}"] == 2 * (512 * (64 + 128) + 4 * 64 * 128)


def test_operations_of_a_norm_and_of_attention_by_hand() -> None:
    """256 tokens, 4 heads of 64: torch's norm of hidden states has five float32 tensors, attention the gradients of
    its output, of queries, and of keys and values, which are repeated for every head."""
    found: dict[Any, Operation] = {op.after: op for op in attention_operations(ungated(CONFIG), 0)}
    assert found["attention norm 1/rms"].backward == 5 * 4 * 256 * 128
    assert found[CORE].backward == 2 * 256 * 4 * 64 * 4


def captured(stages: int, **options: Any) -> tuple[ActivationBytes, list[ActivationBytes]]:
    """The first of so many stages, of 8 micro-batches of 256 tokens on GPUs: under CUDA graphs, and its moments
    without."""
    family = family_of(CONFIG)
    spec = family.spec(CONFIG)
    layout = Layout(stages, pp=stages)
    kernels = ComputeKernels(TRANSFORMER_ENGINE, TRANSFORMER_ENGINE, "bfloat16", True)
    [chunks, *_] = model_chunks_by_stage(spec.num_layers, layout, PipelineSplit())
    setups = []
    for impl in ("local", "none"):
        cfg = SwiftConfig(task="sft", model="model", pp=stages, cuda_graph_impl=impl, **ROWS, **options)
        parts = TrainedParts.of(cfg.model, cfg.lora, family, spec)
        setups.append(MicrobatchSetup(step_options(cfg, 1), spec, layout, kernels, parts))
    return activation_bytes(setups[0], 0, chunks, 8), [*activation_moments(setups[1], 0, chunks, 8)]


def test_what_cuda_graphs_hold_by_hand() -> None:
    """Layers and the head cannot use each other's memory: their peaks add up. A stage with two micro-batches in flight
    has buffers for two inputs and one gradient, of 256 tokens with 128 numbers each."""
    hidden = 2 * 256 * 128
    for stages, buffers in ((1, 2), (2, 3)):
        found, moments = captured(stages)
        layers = max(one.kept + one.recomputed + one.working for one in moments)
        outside = max(one.head for one in moments) + max(one.batches for one in moments)
        assert found.total == layers + outside + buffers * hidden
        assert found.total > max(one.total for one in moments)


def test_gradients_of_weights_in_cuda_graphs_by_hand() -> None:
    """Those of a layer that are not added to main gradients are in the graphs' memory, and copied out of it: queries of
    256 numbers, keys and values of as many, and an MLP of three matrices."""
    (fused, _), (apart, _) = captured(1), captured(1, gradient_accumulation_fusion=False)
    h, a, f = CONFIG["hidden_size"], 4 * 64, CONFIG["intermediate_size"]
    kv = 2 * CONFIG["num_key_value_heads"] * 64
    assert apart.working - fused.working == 2 * 2 * h * (a + kv + a + 3 * f)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memory-models")


def computed(run: CountedRun, kernels: str) -> list[Saved]:
    """Of the first rank of each pipeline stage: when its first backward pass begins, and at the peak of what is kept.
    Not what kernels use beside it."""
    cfg, spec, layout = run.setup()
    parts = parts_of(cfg, spec)
    setup = MicrobatchSetup(
        step_options(cfg, layout.dp),
        spec,
        layout,
        ComputeKernels(kernels, kernels, cfg.model.torch_dtype, False),
        parts,
    )
    stages, case = (
        model_chunks_by_stage(spec.num_layers, layout, PipelineSplit.from_config(cfg.parallel)),
        parse(run.text),
    )
    found = []
    for stage, chunks in enumerate(stages):
        own = case.total // case.dp
        sizes = sorted((kept_by_chunk(setup, chunk).total for chunk in chunks), reverse=True)
        forward = sum(sizes[i % len(sizes)] for i in range(passes_in_flight(setup, stage, own)))
        forward += shared_angle_bytes(setup)
        forward += last_stage_head(setup).kept if any(chunk.loss for chunk in chunks) else 0
        masks = mask_bytes(setup, [layer for chunk in chunks for layer in chunk.layers])
        forward += masks * passes_in_flight(setup, stage, own)
        saved = (m.kept + m.recomputed for m in activation_moments(setup, stage, chunks, own))
        found.append(Saved(forward, max(forward, *saved)))
    return found


def check(run: CountedRun, pool: Pool, kernels: str = TORCH) -> list[tuple[Saved, Saved]]:
    """(counted, computed) of each rank."""
    ranks, stages = pool.run("tests.memory.counted_ranks:count_saved", run, run.world), computed(run, kernels)
    pairs = [(rank, stages[i * len(stages) // run.world]) for i, rank in enumerate(ranks)]
    assert [r.forward for r, _ in pairs] == [pytest.approx(s.forward, rel=TOLERANCE) for _, s in pairs]
    return pairs


@pytest.mark.process
@pytest.mark.parametrize(
    ("model", "text", "options"),
    [
        ("dense", "single", {}),
        ("dense", "single", {"torch_dtype": "float32"}),
        ("dense", "single", full()),
        ("dense", "single", full(recompute_num_layers=2)),
        ("dense", "single", full(recompute_method="block", recompute_num_layers=2)),
        ("dense", "single", selective()),
        ("dense", "tp2 sp", {}),
        ("dense", "tp2", {}),
        ("dense", "cp2", {}),
        ("dense", "pp4", {}),
        ("moe", "dp2 ep2", {}),
        ("moe", "dp2 ep2", {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True}),
        ("moe", "dp2 ep2", {"moe_grouped_gemm": False}),
        ("moe", "single", {**LORA, "moe_grouped_gemm": False}),
        ("moe", "single", selective("moe")),
        ("moe", "single", {**LORA, "lora_dropout": 0.1}),
        ("moe", "single", {**LORA, "lora_rank": 8}),
        ("moe", "single", {**LORA, "target_modules": ("q_proj",)}),
        ("dense", "single", {**LORA, "target_modules": ("q_proj", "v_proj")}),
        ("dense", "single", {"train_type": "qlora"}),
    ],
    ids=str,
)
def test_kept_tensors(model: str, text: str, options: dict[str, Any], pool: Pool, folders: Path) -> None:
    """Torch's layers: at the end of the forward pass and at the peak, within the tolerance."""
    run = CountedRun(text, model_folder(folders / model, MODELS[model]), ROWS | options)
    for counted, expected in check(run, pool):
        assert counted.peak == pytest.approx(expected.peak, rel=TOLERANCE)


@pytest.mark.process
@pytest.mark.parametrize("text", ["single", "tp2", "tp2 sp"])
def test_no_tensor_of_a_layer_is_missing(text: str, pool: Pool, folders: Path) -> None:
    """With the identifiers, labels and places of tokens, 32 bytes each, nothing is left but a two-thousandth: the
    smallest tensor of a layer is more."""
    run = CountedRun(f"dense {text}", model_folder(folders / "dense", CONFIG), ROWS)
    for counted, expected in check(run, pool):
        assert counted.forward == pytest.approx(expected.forward + 32 * 256, rel=0.0005)


@pytest.mark.process
@pytest.mark.parametrize("variant", ["llama", "phi3", "glm4_moe", "qwen2_moe"])
def test_kept_tensors_of_other_families(variant: str, pool: Pool, folders: Path) -> None:
    """Without norms of queries and keys, with windows, with shared experts that have a gate or none, dense layers
    before MoE layers."""
    check(CountedRun(f"{variant} single", build(variant, folders / variant), ROWS), pool)


@pytest.mark.process
def test_interleaved_schedule_keeps_no_more(pool: Pool, folders: Path) -> None:
    """Chunks differ, and which of them are in flight is taken to be the larger ones: at most 3% too much."""
    run = CountedRun("dense pp2 vpp2", model_folder(folders / "dense", CONFIG), ROWS)
    ranks, stages = pool.run("tests.memory.counted_ranks:count_saved", run, 2), computed(run, TORCH)
    for rank, stage in zip(ranks, stages, strict=True):
        assert rank.forward * (1 - 0.001) <= stage.forward <= rank.forward * 1.03


@pytest.mark.process
@pytest.mark.parametrize(
    ("model", "options"),
    [("dense", {}), ("dense", full()), ("dense", selective("mlp")), ("moe", {}), ("dense", LORA), ("moe", LORA)]
    + [("moe", options | {"moe_grouped_gemm_impl": "torch"}) for options in ({}, LORA)],
    ids=str,
)
def test_kept_tensors_of_transformer_engine(model: str, options: dict[str, Any], te_pool: Pool, folders: Path) -> None:
    """Its own Python on the test device, at the end of the forward pass: what stands in for its kernels saves tensors
    within a backward pass that the kernels do not."""
    check(
        CountedRun("dense single", model_folder(folders / model, MODELS[model]), ROWS | options | TE),
        te_pool,
        TRANSFORMER_ENGINE,
    )


@pytest.mark.process
@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        ("deepseek_v3", "single"),
        ("minimax_m2", "single"),
        *(
            pytest.param(variant, layout, marks=pytest.mark.slow)
            for variant, layout in (
                ("deepseek_v3", "tp2 sp"),
                ("deepseek_v3", "dp2 ep2"),
                ("deepseek_v3", "pp2"),
                ("deepseek_v3", "cp2"),
                ("deepseek_v2", "single"),
                ("glm4_moe_lite", "single"),
                ("glm4", "single"),
                ("exaone4", "single"),
                ("olmo2", "single"),
            )
        ),
    ],
)
def test_families_of_transformer_engine(variant: str, layout: str, te_pool: Pool, folders: Path) -> None:
    """Latent attention, norms over all heads, norms behind attention and MLP."""
    folder = build(variant, folders / variant)
    check(CountedRun(f"{variant} {layout}", folder, ROWS | TE), te_pool, TRANSFORMER_ENGINE)


@pytest.mark.process
def test_what_fit_chooses_for_8b_keeps_what_the_formulas_say(te_pool: Pool, folders: Path) -> None:
    """docs/memory.md: the precision-aware optimizer with MLPs computed again."""
    chosen = {"precision_aware_optimizer": True, **selective("mlp")}
    run = CountedRun("dense do te", model_folder(folders / "dense", CONFIG), ROWS | chosen)
    check(run, te_pool, TRANSFORMER_ENGINE)


@pytest.mark.process
@pytest.mark.parametrize(
    ("model", "options"), [("dense", {}), ("dense", full()), ("moe", {}), ("dense", LORA), ("moe", LORA)], ids=str
)
def test_fp8_keeps_no_more(model: str, options: dict[str, Any], te_pool: Pool, folders: Path) -> None:
    """The formulas are those of 16 bits: of inputs in FP8 a layer keeps a byte. What autograd keeps besides are copies
    of weights, which are held anyway."""
    fp8 = {"fp8_format": "hybrid", "fp8_recipe": "blockwise"}
    run = CountedRun("dense single", model_folder(folders / model, MODELS[model]), ROWS | TE | options | fp8)
    (rank,) = te_pool.run("tests.memory.counted_ranks:count_saved", run, 1)
    (stage,) = computed(run, TRANSFORMER_ENGINE)
    recomputes = "recompute_granularity" in options
    copies = 0 if recomputes else 2 * 4 * (128 * 512 + 256 * 128 + 3 * 128 * 256)
    assert 0.7 * stage.forward < rank.forward - copies <= stage.forward * (1 + TOLERANCE)


@pytest.mark.process
def test_recomputing_attention_saves_nothing(pool: Pool, te_pool: Pool, folders: Path) -> None:
    """Flash attention keeps no scores: with core_attn recomputed more is kept than without."""
    for some, options in ((pool, {}), (te_pool, TE)):
        plain, again = (
            some.run(
                "tests.memory.counted_ranks:count_saved",
                CountedRun("dense single", model_folder(folders / "dense", CONFIG), ROWS | options | more),
                1,
            )[0]
            for more in ({}, selective("core_attn"))
        )
        assert again.forward >= plain.forward
