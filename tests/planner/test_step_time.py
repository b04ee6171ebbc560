"""The time of a step against figures worked out by hand from the data sheets of an H100.

Covers: megaswift/planner/step_time.py, megaswift/planner/layer_time.py, megaswift/planner/machine.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megaswift.memory.estimate import TrainedModel
from megaswift.memory.microbatch_setup import MicrobatchSetup
from megaswift.parallel.layout import Layout
from megaswift.parallel.pipeline_split import PipelineSplit
from megaswift.planner.layer_time import LayerTime, layer_time
from megaswift.planner.machine import LINK, NETWORK
from megaswift.planner.step_time import StepTime, TimeModel
from megaswift.run.checks.fit import step_options
from megaswift.run.checks.layout_plan import planned_kernels
from tests.planner.questions import H100, run_of, spec_of

PEAK = 989.4e12
LINEAR = 36 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288)
"""Weights of Qwen3-8B's products in decoder layers."""
HEAD = 151936 * 4096
FIRST_AND_LAST = PipelineSplit(first=11, last=11)
"""Of 94 layers on 8 stages."""


def step(
    name: str, layout: Layout, passes: int = 1, rows: int = 1, split: PipelineSplit | None = None, **options: Any
) -> StepTime:
    cfg = run_of(name, **options)
    spec = spec_of(name)
    run = TrainedModel.of(cfg.model, cfg.lora, spec, planned_kernels(cfg, spec)).on(layout, split or PipelineSplit())
    return TimeModel(H100).on(run).step(replace(step_options(cfg, 1), rows=rows, passes=passes))


def test_products_are_six_flops_a_weight_and_token() -> None:
    """An 8 B model, four micro-batches of 4,096 tokens: 4 x (170.6 + 15.3) TFLOP at 0.7 of 989."""
    found = step("qwen3-8b", Layout(8), passes=4)
    assert found.passes.products == pytest.approx(4 * 6 * (LINEAR + HEAD) * 4096 / (0.7 * PEAK), rel=1e-3)
    # 3.5 forward passes of half the square: 2 x 2 x 4,096 x 2,048 x 4,096 FLOPs a layer
    attention = 4 * 36 * 3.5 * 4 * 4096 * 2048 * 4096
    assert found.passes.attention == pytest.approx(attention / (0.5 * PEAK), rel=1e-6)
    assert found.bubble == found.passes.tensor_parallel == found.passes.all_to_all == 0
    # gradients, 4 bytes; of an eighth the update: 2 x 4 gradients, main weights and two moments read and written, bf16
    # weights
    traffic = (LINEAR + 2 * HEAD) * (4 + (8 + 8 + 16 + 2) / 8)
    assert found.optimizer == pytest.approx(traffic / (0.8 * 3350e9), rel=0.01)


def test_frozen_weights_have_no_gradient() -> None:
    """LoRA: two thirds of the products, and the adapters' own."""
    found = step("qwen3-8b", Layout(1), train_type="lora")
    assert found.passes.products > 4 * (LINEAR + HEAD) * 4096 / (0.7 * PEAK)
    # a layer's four products read their input once an adapter and add to their output, forward, and twice backward
    rows = 3 * 4096 + 2 * 6144 + 4096 + 2 * 4096 + 2 * 4096 + 2 * 24576 + 12288 + 2 * 4096
    adapters = 36 * 3 * 2 * 4096 * rows / (0.8 * 3350e9)
    assert found.passes.products == pytest.approx(4 * (LINEAR + HEAD) * 4096 / (0.7 * PEAK) + adapters, rel=1e-3)


def test_recomputation_repeats_the_forward_pass() -> None:
    """MLPs of an 8 B model: 44.5 TFLOP for 4,096 tokens; everything: a third of the passes' products."""
    mlp = step("qwen3-8b", Layout(1), recompute_granularity="selective", recompute_modules=("mlp",)).recomputation
    products = 2 * 36 * 3 * 4096 * 12288 * 4096 / (0.7 * PEAK)
    assert products < mlp < 1.15 * products
    full = step("qwen3-8b", Layout(1), recompute_granularity="full")
    again = 2 * LINEAR * 4096 / (0.7 * PEAK) + full.passes.attention / 3.5
    assert again < full.recomputation < 1.15 * again


def test_the_bubble_is_that_of_narayanan() -> None:
    """(P - 1) / (V m) of the passes, where stages are equal: without the head's part."""
    layout = Layout(8, tp=1, pp=4)
    plain = step("qwen3-8b", layout, passes=8)
    interleaved = step("qwen3-8b", Layout(8, pp=4, vpp=3), passes=8)
    assert interleaved.bubble == pytest.approx(plain.bubble / 3, rel=1e-6)
    head = step("qwen3-8b", Layout(1)).passes.total - 4 * (step("qwen3-8b", layout, passes=8).bubble / 3)
    assert plain.bubble == pytest.approx(3 / 8 * (plain.passes.total - 8 * head), rel=0.01)


def test_all_to_all_of_a_model_of_235_b_on_256_gpus() -> None:
    """TP2 PP8 EP32, micro-batches of 4,096 tokens: 134 MB of each rank's 2,048 tokens to 8 experts, four times a layer,
    of which 24 of 32 ranks are on other nodes, at 0.8 of 50 GB/s; a middle stage has 12 layers."""
    layout = Layout(256, tp=2, pp=8, ep=32, sequence_parallel=True)
    found = step("qwen3-235b-a22b", layout, passes=64, split=FIRST_AND_LAST)
    size = 2048 * 8 * 4096 * 2
    assert found.passes.all_to_all / 64 == pytest.approx(12 * 4 * size * 24 / 32 / (0.8 * 50e9), rel=1e-6)
    assert found.passes.all_to_all / 64 == pytest.approx(0.122, rel=0.02), "the review's estimate by hand"
    assert found.links == {"tp": LINK, "ep": NETWORK, "dp": NETWORK, "pp": NETWORK}


def test_tensor_parallel_ranks_gather_and_scatter_hidden_states() -> None:
    """Four times forward and four times backward in a layer, at 0.8 of NVLink's 450 GB/s; without sequence parallelism
    as many bytes in all-reduces."""
    size = 4096 * 4096 * 2
    head = 2 * size / 2
    expected = (36 * 8 * size / 2 + head) / (0.8 * 450e9)
    assert step("qwen3-8b", Layout(2, tp=2, sequence_parallel=True)).passes.tensor_parallel == pytest.approx(expected)
    plain = step("qwen3-8b", Layout(2, tp=2, sequence_parallel=False), sequence_parallel=None)
    assert plain.passes.tensor_parallel == pytest.approx(expected)


def test_gradients_that_no_pass_hides() -> None:
    """70 B on 32 nodes with one micro-batch: 4 bytes a parameter over the network take longer than the backward
    pass."""
    few = step("llama-3.1-70b", Layout(256, tp=8, sequence_parallel=True))
    assert few.data_parallel > 0
    assert step("qwen3-8b", Layout(8), passes=4).data_parallel == 0


def test_a_reference_adds_a_forward_pass_and_the_exchange_of_weights() -> None:
    """DPO of pairs: each micro-batch has twice the tokens; the forward pass is a third of the products. The exchange
    copies the weights and writes both sides, forth and back: six times read and written. On the host twice over the
    link. Nothing for adapters on a frozen base but the pass."""
    plain = step("qwen3-8b", Layout(8), passes=4, rows=2)
    dpo = step("qwen3-8b", Layout(8), passes=4, task="dpo")
    assert dpo.passes.total == pytest.approx(plain.passes.total, rel=1e-3)
    assert plain.scoring == 0
    forward = plain.passes.products / 3 + plain.passes.attention / 3.5
    exchange = 6 * 2 * 2 * (LINEAR + 2 * HEAD) / (0.8 * 3350e9)
    assert forward + exchange < dpo.scoring < 1.12 * forward + exchange
    host = step("qwen3-8b", Layout(8), passes=4, task="dpo", offload_reference=True).scoring
    assert host - dpo.scoring == pytest.approx(2 * 2 * 2 * (LINEAR + 2 * HEAD) / 20e9 - exchange, rel=1e-3)
    known = step("qwen3-8b", Layout(8), passes=4, task="dpo", precompute_ref_log_probs=True)
    assert known.scoring == 0 and known.total < dpo.total
    lora = step("qwen3-8b", Layout(8), passes=4, task="dpo", train_type="lora").scoring
    assert forward < lora < 1.3 * forward, "the pass is taken to have the adapters' products"
    assert step("qwen3-8b", Layout(8), passes=4, rows=2, task="kto").scoring > 2.9 * forward
    staged = step("qwen3-8b", Layout(8, pp=4), passes=8, task="dpo", train_type="lora", precompute_ref_log_probs=False)
    assert staged.scoring > lora * 8 / 4 / 4, "the pipeline fills and drains"


def test_a_small_model_waits_for_the_host() -> None:
    small = step("qwen3-0.6b", Layout(1), max_length=256)
    assert small.passes.host > 0.3 * small.total
    assert step("qwen3-8b", Layout(1)).passes.host == 0


def test_parts_add_up() -> None:
    found = step("qwen3-235b-a22b", Layout(256, tp=2, pp=8, ep=32, sequence_parallel=True), 16, split=FIRST_AND_LAST)
    assert sum(found.parts().values()) == pytest.approx(found.total, rel=1e-9)


FOUR_NODES = Layout(256, tp=2, pp=8, ep=32, sequence_parallel=True)
ONE_NODE = Layout(64, tp=2, pp=8, ep=8, sequence_parallel=True)
FLEX = {"moe_token_dispatcher_type": "flex"}
OVERLAP = {"overlap_moe_expert_parallel_comm": True}


def layer(layout: Layout, **options: Any) -> LayerTime:
    """A layer of Qwen3-235B-A22B on H100."""
    cfg = run_of("qwen3-235b-a22b", **options)
    spec = spec_of("qwen3-235b-a22b")
    run = TrainedModel.of(cfg.model, cfg.lora, spec, planned_kernels(cfg, spec)).on(layout, FIRST_AND_LAST)
    return layer_time(MicrobatchSetup(step_options(cfg, 1), spec, layout, run.kernels, run.parts), 1, H100)


def test_a_flexible_dispatcher_sends_a_token_once_to_each_node() -> None:
    """Eight experts on four nodes: 4 x (1 - (3/4)^8) = 3.6 of them, where an all-to-all sends eight copies; on eight
    ranks of one node 8 x (1 - (7/8)^8) = 5.3."""
    for layout, share in ((FOUR_NODES, 4 * (1 - 0.75**8) / 8), (ONE_NODE, 1 - (7 / 8) ** 8)):
        once, each = layer(layout, **FLEX), layer(layout)
        assert once.forward.all_to_all == pytest.approx(share * each.forward.all_to_all, rel=1e-6)
        assert once.backward.all_to_all == pytest.approx(share * each.backward.all_to_all, rel=1e-6)


def test_overlapped_exchanges_count_as_far_as_they_are_longer() -> None:
    """Over the network all work of both passes hides its part of the four exchanges; within a node nothing is left."""
    plain, overlapped = layer(FOUR_NODES), layer(FOUR_NODES, **OVERLAP)
    hidden = sum(
        getattr(plain, name).all_to_all - getattr(overlapped, name).all_to_all for name in ("forward", "backward")
    )
    work = sum(t.products + t.attention + t.elementwise for t in (plain.forward, plain.backward))
    assert hidden == pytest.approx(work, rel=1e-6) and overlapped.forward.all_to_all > 0
    within = layer(ONE_NODE, **OVERLAP, **FLEX)
    assert within.forward.all_to_all == within.backward.all_to_all == 0
    assert overlapped.forward.products == plain.forward.products
