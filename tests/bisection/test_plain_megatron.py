"""The recorder for plain Megatron-LM on Megatron-Core's own GPTModel, layers, schedule and optimizer.

scripts/record_megatron_lm.py is imported as a user's script would.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaswift.bisection.judge import compare_with, references_of
from megaswift.bisection.trace_folder import Trace
from megaswift.config import SwiftConfig
from tests.bisection.plain_megatron import LR, PlainTask, write_model
from tests.parity.pool import Pool
from tests.sources import ROOT


@pytest.mark.process
@pytest.mark.parametrize(
    ("variant", "sizes", "dtype", "fault"),
    [
        ("dense", (2, 2, 1), "float32", 1e-3),
        pytest.param("dense", (2, 2, 1), "bfloat16", 1.0, marks=pytest.mark.slow),
        pytest.param("moe", (1, 1, 2), "float32", 1e-3, marks=pytest.mark.slow),
    ],
)
def test_megatron_cores_own_model(
    variant: str, sizes: tuple[int, int, int], dtype: str, fault: float, tmp_path: Path, pool: Pool
) -> None:
    """Without a fault nothing differs; a shard that is too large is named. `sizes`: TP, PP and EP."""
    model = write_model(tmp_path / "model", variant, dtype)
    task = PlainTask(model, tmp_path / "trace", *sizes, dtype=dtype)
    world = math.prod(sizes)
    pool.run("tests.bisection.plain_megatron:record", task, world)
    options: dict[str, Any] = {"learning_rate": LR, "adam_epsilon": 1e-5, "max_grad_norm": 0.5, "weight_decay": 0.0}
    if variant == "moe":
        options["moe_aux_loss_coeff"] = 0.0
    trace = Trace.open(task.trace)
    steps = references_of(trace, model, SwiftConfig(task="sft", model=str(model), **options))
    steps = replace(steps, perturbed=list(steps.perturbed))
    found = compare_with(trace, model, steps)
    assert found.first is None
    assert {name.split(" ")[0].split(".", 2)[2] for name in found.skipped} == {"pre_cross_attn_layernorm"}
    kinds = {v.kind for v in found.verdicts}
    assert kinds == {"input", "output", "loss", "output_gradient", "gradient", "weight"}
    modules = {"dense": "layers.3.mlp.linear_fc1", "moe": "layers.3.mlp.experts.3.linear_fc1"}
    names = {v.name for v in found.verdicts}
    assert {"output_layer", "layers.3.self_attention.k_layernorm", "embedding", f"{modules[variant]}.weight"} <= names

    wrong = replace(task, trace=tmp_path / "wrong", fault=fault)
    pool.run("tests.bisection.plain_megatron:record", wrong, world)
    first = compare_with(Trace.open(wrong.trace), model, steps).first
    assert first is not None and (first.name, first.kind) == ("layers.1.self_attention.linear_qkv", "output")
    assert first.rank == 1 and first.difference == pytest.approx(fault, rel=0.05)


def test_the_recorder_is_short() -> None:
    assert len((ROOT / "scripts/record_megatron_lm.py").read_text().splitlines()) <= 60
