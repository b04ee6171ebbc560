"""Time of steps on torch engines by hand, and their rows beside the native engine's.

Covers: megaswift/planner/torch_time.py, megaswift/memory/torch_estimate.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megaswift.memory.estimate import TrainedModel
from megaswift.memory.torch_estimate import KINDS, TorchRun
from megaswift.parallel.layout import Layout
from megaswift.planner.machine import NETWORK, Machine
from megaswift.planner.step_time import StepTime
from megaswift.planner.torch_time import torch_step_time
from megaswift.run.checks.fit import step_options
from megaswift.run.checks.layout_plan import engines_to_compare, plan_problems, plan_run, planned_kernels
from tests.planner.questions import H100, run_of, spec_of

PARAMETERS = 8190735360


SLOW_NETWORK = replace(H100, gpu=replace(H100.gpu, network_gbs=5.0))


def step(kind: str, ranks: int, passes: int = 1, machine: Machine = H100) -> StepTime:
    cfg = run_of("qwen3-8b", engine=kind)
    spec = spec_of("qwen3-8b")
    run = TorchRun(TrainedModel.of(cfg.model, cfg.lora, spec, planned_kernels(cfg, spec)), kind, ranks)
    assert run.elements == (PARAMETERS, PARAMETERS)
    return torch_step_time(run, replace(step_options(cfg, 1), rows=1, passes=passes), machine)


def test_what_passes_do_not_hide() -> None:
    """Within a node everything but the weights that ZeRO-1 and 2 gather after a step, 2 bytes a parameter by 7 of 8
    ranks. On a slow network FSDP2's exchanges take longer than the passes of each micro-batch; DDP's than one."""
    rate = H100.seconds("all_gather", 1.0, Layout(8), "dp")
    assert step("zero2", 8).data_parallel == pytest.approx(2 * PARAMETERS * rate)
    assert step("fsdp2", 8).data_parallel == step("ddp", 8).data_parallel == 0
    far = step("fsdp2", 512, 1, SLOW_NETWORK)
    assert far.links == {"dp": NETWORK} and far.data_parallel > 0
    assert step("fsdp2", 512, 4, SLOW_NETWORK).data_parallel == pytest.approx(4 * far.data_parallel)
    once = step("ddp", 512, 1, SLOW_NETWORK).data_parallel
    assert once > 0
    assert step("ddp", 512, 4, SLOW_NETWORK).data_parallel == pytest.approx(once)


def test_optimizer_by_hand() -> None:
    """Three times 4 bytes of gradients, two moments and float32 weights read and written, 2 bytes of new weights; all
    of it on each rank of DDP, an eighth under FSDP2."""
    whole = PARAMETERS * (12 + 16 + 8 + 2) / H100.memory_rate
    assert step("ddp", 8).optimizer == pytest.approx(whole)
    assert step("fsdp2", 8).optimizer == pytest.approx(whole / 8)


def test_rows_of_torch_engines() -> None:
    """Beside the native engine's where no option belongs to it alone; the best of each engine in one row."""
    cfg = run_of("qwen3-8b")
    spec = spec_of("qwen3-8b")
    assert engines_to_compare(cfg, spec) == ("megatron", *KINDS)
    found = plan_run(cfg, spec, H100, 8, engines=engines_to_compare(cfg, spec))
    rows = {row.engine: row for row in found.rows if row.engine != "megatron"}
    assert {"fsdp2", "zero3"} <= {*rows} and "ddp" not in rows, "16 bytes a parameter are too many for 80 GB"
    for row in rows.values():
        assert row.needed <= found.question.usable and row.rows * row.passes * 8 == 32
        assert row.memory.held.weights < 16 * PARAMETERS
    for other in ({"tp": 2}, {"engine": "megatron"}, {"fp8_format": "hybrid"}, {"task": "dpo"}):
        assert engines_to_compare(run_of("qwen3-8b", **other), spec) == ("megatron",)
    assert engines_to_compare(cfg, spec_of("qwen3-30b-a3b")) == ("megatron",)
    (problem,) = plan_problems(run_of("qwen3-30b-a3b", engine="fsdp2"), spec_of("qwen3-30b-a3b"), H100)
    assert "do not cover the family qwen3_moe" in problem.rule
