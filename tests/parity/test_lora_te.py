"""LoRA on Transformer Engine's modules against Hugging Face: adapters of grouped experts in two grouped products, of
layers that normalize their output, of fused and latent projections.

Covers: megaswift/engine/megatron/lora/experts.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.parity.cases import parse
from tests.parity.measure import Task, build
from tests.parity.pool import Pool
from tests.parity.test_lora import SEEDS, Adapters, adapters, check

assert adapters is not None
pytestmark = pytest.mark.process
LAYOUTS = [
    "dense te cp2 packed comm=p2p",
    "dense te dp2 do overlap",
    "moe te tp2 sp dp2 ep2 do",
    "gemma2 te tp2 sp",
]
LATER = [
    "moe te dp2 ep2 do overlap recompute=moe",
    "dense te tp2 sp",
    "dense te single",
    "dense te pp2 vpp2",
    "dense te tp2 recompute=full",
    "moe te single",
    "moe te tp2 sp etp2",
    "moe te tp2 sp dp2 ep2 etp2 do",
    "moe te pp2 packed",
    "olmo2 te pp2",
    "granite te tp2",
    "glm4 te tp2",
    "glm4_moe te dp2 ep2",
    "qwen2_moe te tp2 sp",
    "deepseek_v3-dense te tp2",
    "mixtral te tp2 ep2 sp",
    "gpt_oss te dp2 ep2",
]


@pytest.mark.parametrize("text", [*LAYOUTS, *(pytest.param(text, marks=pytest.mark.slow) for text in LATER)])
def test_layout(text: str, te_pool: Pool, adapters: Adapters) -> None:  # noqa: F811
    """Adapters on every projection."""
    check(*adapters.of(parse(text), seed=SEEDS.get(text, 5)), te_pool)


def test_single_experts(te_pool: Pool, adapters: Adapters) -> None:  # noqa: F811
    """Experts of a grouped layer without adapters, and with one of its two modules."""
    leaves, saved = ("experts.1.gate_proj", "experts.2.down_proj"), ("model.layers.0.mlp.gate.weight",)
    check(*adapters.of(parse("moe te tp2 sp dp2 ep2"), leaves, saved), te_pool)


LORA = {"train_type": "lora", "target_modules": ("all-linear",)}
WHOSE = [
    ("single", LORA, "GroupedExperts"),
    ("single packed", LORA | {"moe_token_dispatcher_type": "allgather"}, "GroupedExperts"),
    ("single", LORA | {"moe_grouped_gemm_impl": "transformer_engine"}, "TEGroupedMLP"),
    ("single", LORA | {"modules_to_save": ("mlp.experts.1.down_proj",)}, "TEGroupedMLP"),
    ("single", LORA | {"torch_dtype": "float32"}, "TEGroupedMLP"),
    ("single", {}, "TEGroupedMLP"),
    ("tp2 sp etp2", LORA, "TEGroupedMLP"),
    ("dp2 ep2", LORA, "TEGroupedMLP"),
]


def kind_of_experts(rank: int, world: int, task: Task) -> tuple[str, str]:
    """(class of the experts of the first layer, the first screen's line)."""
    engine, context = build(task.case, task.folder, world, **task.options)
    found = type(engine.plain[0].decoder.layers[0].mlp.experts).__name__, engine.kernels
    torch.distributed.barrier()
    context.close()
    return found


@pytest.mark.parametrize(("text", "options", "kind"), WHOSE, ids=str)
def test_whose_product(
    text: str,
    options: dict[str, Any],
    kind: str,
    te_pool: Pool,
    adapters: Adapters,  # noqa: F811
) -> None:
    """By itself torch's where the host then waits for nothing and no gradient of an expert is summed in float32."""
    case = parse(f"moe te {text}")
    folder = adapters.references.model(case.variant)
    task = Task(case, folder, adapters.references.recipe, options={"torch_dtype": "bfloat16", **options})
    for name, screen in te_pool.run("tests.parity.test_lora_te:kind_of_experts", task, case.world):
        assert name == kind and ("experts (torch's grouped product)" in screen) == (kind == "GroupedExperts")


@pytest.mark.parametrize(
    "options",
    [{"moe_grouped_gemm": False}, pytest.param({"moe_grouped_gemm_impl": "torch"}, marks=pytest.mark.slow)],
    ids=str,
)
def test_other_products_of_experts(options: dict[str, Any], te_pool: Pool, adapters: Adapters) -> None:  # noqa: F811
    """The same numbers."""
    task, want = adapters.of(parse("moe te dp2 ep2"))
    check(replace(task, options={**task.options, **options}), want, te_pool)
