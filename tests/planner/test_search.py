"""The search against trying everything: each layout with each of its settings, memory and time of each computed alone.

Covers: megaswift/planner/search.py, megaswift/memory/estimate.py, megaswift/memory/checkpoint_bytes.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from megaswift.memory.checkpoint_bytes import checkpoint_bytes
from megaswift.memory.estimate import COMMUNICATOR, TrainedModel, communicator_bytes
from megaswift.parallel.checks import layout_problems
from megaswift.parallel.constraints import LayoutRequest
from megaswift.parallel.layout import Layout
from megaswift.parallel.model_shape import ModelShape
from megaswift.parallel.pipeline_split import PipelineSplit
from megaswift.planner.machine import Machine
from megaswift.planner.search import Plan, Question, flop_formula
from megaswift.planner.settings import combinations, with_settings
from megaswift.planner.step_time import TimeModel
from megaswift.run.checks.fit import settings_left_open, step_options
from megaswift.run.checks.layout_plan import LAST_RESORTS, plan_run, planned_kernels, row_as_given
from tests.planner.questions import H100, H200, run_of, spec_of


def plan(name: str, gpus: int, machine: Machine = H100, **options: Any) -> Plan:
    return plan_run(run_of(name, **options), spec_of(name), machine, gpus)


def everything(question: Question) -> Iterator[tuple[float, int, str]]:
    """(seconds, bytes, layout) of every layout of powers of two, micro-batch and setting, computed from scratch."""
    spec = question.model.spec
    for tp, pp, cp in product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4)):
        if 8 % (tp * pp * cp) or spec.num_layers % pp:
            continue
        layout = Layout(8, tp=tp, pp=pp, cp=cp, sequence_parallel=tp > 1)
        for rows in (1, 2, 4, 8):
            passes, rest = divmod(question.global_batch, layout.dp * rows)
            if rest or not passes:
                continue
            now = replace(question.options, rows=rows, passes=passes)
            for settings in combinations(now, question.model.kernels, spec, question.left_open):
                if {"per_device_train_batch_size"} & settings.keys():
                    continue
                options = with_settings(now, settings)
                run = replace(question.model, places={}).on(layout, PipelineSplit())
                seconds = TimeModel(question.machine).on(run).step(options).total
                yield seconds, run.estimate(options).total + communicator_bytes(layout), layout.describe()


@pytest.mark.wide
@pytest.mark.parametrize("given", [{}, {"recompute_granularity": "none", "precision_aware_optimizer": False}], ids=str)
def test_the_first_row_is_the_fastest_of_all_that_fit(given: dict[str, Any]) -> None:
    """Without model chunks. A layout's settings are those that add least, so that one with smaller states
    and a shorter step may be passed over; the row is never slower than the fastest by more than the optimizer."""
    found = plan("qwen3-8b", 8, vpp=1, **given)
    question = found.question
    tried = list(everything(question))
    fitting = [one for one in tried if one[1] <= question.usable]
    assert len(tried) > 50 and 0 < len(fitting) < len(tried)
    seconds, _, layout = min(fitting)
    best = found.rows[0]
    assert best.layout.describe() == layout
    assert seconds <= best.time.total <= seconds + best.time.optimizer
    even = [row.layout.describe() for row in found.rows if row.split == PipelineSplit()]
    assert {*even} == {one[2] for one in fitting}


@pytest.mark.wide
def test_rows_are_ranked_fit_and_obey_the_rules() -> None:
    """Of 70 B on 512 GPUs in seconds; each row is the global batch, and passes the checks of a run."""
    found = plan("llama-3.1-70b", 512, max_length=8192, global_batch_size=2048)
    spec = spec_of("llama-3.1-70b")
    assert len(found.rows) == 20 and found.legal > 300 > found.compared
    assert [row.tokens for row in found.rows] == sorted((row.tokens for row in found.rows), reverse=True)
    for row in found.rows:
        cfg = run_of("llama-3.1-70b", max_length=8192, global_batch_size=2048, **row.options())
        request = LayoutRequest.of(cfg.parallel, 512, 8192, cfg.train)
        assert layout_problems(ModelShape.of(spec), request) == []
        assert request.layout == row.layout
        assert row.needed <= found.question.usable
        assert row.rows * row.passes * row.layout.dp == 2048
        assert row.tokens == pytest.approx(2048 * 8192 / 512 / row.time.total)
    assert len({(r.layout.tp, r.layout.pp, r.layout.cp) for r in found.rows}) == 20, "model chunks alone are one row"
    assert found.too_large and all(row.needed > found.question.usable for row in found.too_large)
    assert all(row.tokens > found.rows[0].tokens for row in found.too_large)


def test_what_the_user_has_set_stays() -> None:
    found = plan("qwen3-30b-a3b", 16, tp=2, ep=8, recompute_granularity="full", per_device_train_batch_size=2)
    assert found.rows
    for row in found.rows:
        assert (row.layout.tp, row.layout.ep, row.rows) == (2, 8, 2)
        assert "recompute_granularity" not in row.settings and row.time.recomputation > 0


def test_bfloat16_gradients_and_host_memory_are_last_resorts() -> None:
    """8 B on one GPU of 139 GiB need neither; with float32 moments and without recomputation gradients in bfloat16;
    7.6 B on 79 GiB host memory."""
    roomy = plan("qwen3-8b", 1, H200)
    assert roomy.rows and all(not {*LAST_RESORTS} & {*row.settings} for row in roomy.rows)
    tight = plan("qwen3-8b", 1, H200, recompute_granularity="none", exp_avg_dtype="fp32")
    assert [row.settings for row in tight.rows] == [{"precision_aware_optimizer": True, "main_grads_dtype": "bf16"}]
    small = plan("qwen2.5-7b", 1, max_length=1024)
    assert [row.settings["optimizer_cpu_offload"] for row in small.rows] == [True]


def test_nothing_fits() -> None:
    found = plan("llama-3.1-405b", 8)
    assert not found.rows and 0 < len(found.too_large) <= 5
    assert min(row.memory.total for row in found.too_large) > found.question.usable


def test_communicators_are_counted_by_groups() -> None:
    """TP2 PP8 EP32 on 256 GPUs: all ranks, a model's, tp, pp, dp, ep; experts have one replica."""
    assert communicator_bytes(Layout(1)) == 0
    assert communicator_bytes(Layout(8)) == 2 * COMMUNICATOR
    assert communicator_bytes(Layout(256, tp=2, pp=8, ep=32, sequence_parallel=True)) == 6 * COMMUNICATOR


def test_uneven_experts_need_more() -> None:
    """Of the activations of 30 B on 8 expert-parallel ranks those of experts grow, by as much as their share; without
    expert parallelism each rank has all of its tokens."""
    spec = spec_of("qwen3-30b-a3b")
    cfg = run_of("qwen3-30b-a3b", global_batch_size=32, ep=8, tp=1, pp=1, cp=1)
    even, uneven = (plan_run(cfg, spec, H200, 8, 1, imbalance).rows[0] for imbalance in (1.0, 1.5))
    rows = 4096 * 8 * (2048 + 3 * 768) * 2
    grown = uneven.memory.activations.kept - even.memory.activations.kept
    assert grown == pytest.approx(0.5 * 48 * rows * even.rows, rel=0.01)
    assert uneven.time.passes.all_to_all == pytest.approx(1.5 * even.time.passes.all_to_all)
    alone = run_of("qwen3-30b-a3b", train_type="lora", global_batch_size=32, ep=1)
    one, other = (plan_run(alone, spec, H200, 8, 1, imbalance).rows[0] for imbalance in (1.0, 1.5))
    assert one.memory == other.memory


def test_a_run_s_own_layout() -> None:
    """Nothing of it changes."""
    cfg = run_of("qwen3-8b", tp=2, global_batch_size=16, recompute_granularity="full")
    (row,) = row_as_given(cfg, spec_of("qwen3-8b"), H100, 8).rows
    assert row.layout.describe() == "TP2 SP DP4" and row.settings == {} and (row.rows, row.passes) == (1, 4)
    none = row_as_given(run_of("qwen3-8b"), spec_of("qwen3-8b"), H100, 1)
    assert not none.rows and len(none.too_large) == 1


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-30b-a3b", "llama-3.2-1b"])
def test_flops_are_those_of_the_metric(name: str) -> None:
    """The metric counts the plan's parameters."""
    from megaswift.bridge.plan import WeightPlan
    from megaswift.engine.megatron.sizes import flop_parameter_count
    from megaswift.families import family_of

    spec = spec_of(name)
    cfg = run_of(name)
    formula = flop_formula(TrainedModel.of(cfg.model, cfg.lora, spec, planned_kernels(cfg, spec)))
    counted = flop_parameter_count(WeightPlan(family_of(spec.hf_config), spec), spec)
    assert formula.parameters == pytest.approx(counted, rel=1e-6)


def test_checkpoints_have_fourteen_bytes_a_trained_parameter() -> None:
    """docs/training.md: 3.3 TB for 235 B; with a bfloat16 moment two bytes less; of LoRA the adapters alone."""
    for options, parameters, bytes_each in (
        ({}, 235_093_634_560, 14),
        ({"precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}, 235_093_634_560, 12),
    ):
        cfg = run_of("qwen3-235b-a22b", **options)
        spec = spec_of("qwen3-235b-a22b")
        model = TrainedModel.of(cfg.model, cfg.lora, spec, planned_kernels(cfg, spec))
        assert checkpoint_bytes(model, step_options(cfg, 1)) == bytes_each * parameters
    cfg = run_of("qwen3-8b", train_type="lora", lora_rank=8)
    spec = spec_of("qwen3-8b")
    model = TrainedModel.of(cfg.model, cfg.lora, spec, planned_kernels(cfg, spec))
    rank = 8 * (3 * 4096 + 4096 + 2 * 1024 + 4096 + 4096 + 2 * (4096 + 12288) + 12288 + 4096)
    assert checkpoint_bytes(model, step_options(cfg, 1)) == 14 * 36 * rank
    assert settings_left_open(cfg) > {"recompute_granularity"}
