"""Grouped products against one product after the other: values, gradients, and whether weights are copied.

Covers: megaswift/engine/megatron/layers/moe/experts.py, megaswift/engine/megatron/layers/moe/products.py,
megaswift/models/grouped_experts.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megaswift.config import SwiftConfig
from megaswift.models.grouped_experts import grouped_width_problems, groups_experts
from tests.engine.megatron.layers.empty_groups import leave_empty_groups_unwritten
from tests.placement.device import DEVICE, StandIn

EXPERTS, INPUTS, OUTPUTS = 4, 16, 24


def layer_of(dtype: torch.dtype, bias: bool = False) -> Any:
    """A layer with random weights."""
    from megaswift.engine.megatron.layers.moe.experts import GroupedExpertLinear

    config: Any = SimpleNamespace(use_cpu_initialization=True, params_dtype=dtype, add_bias_linear=bias)
    layer = GroupedExpertLinear(EXPERTS, INPUTS, OUTPUTS, config)
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return layer


def rows_of(counts: list[int] | Tensor) -> Any:
    """Numbers of rows as the layer takes them."""
    from megaswift.engine.megatron.layers.moe.products import ExpertRows

    return ExpertRows.of(torch.as_tensor(counts))


def one_by_one(x: Tensor, layer: Any, counts: list[int]) -> tuple[Tensor, Tensor]:
    """(products, biases) expert by expert."""
    parts = x.split(counts)
    biases = [getattr(layer, f"bias{i}").expand(n, -1) for i, n in enumerate(counts)] if layer.biased else []
    products = [part @ getattr(layer, f"weight{i}").t() for i, part in enumerate(parts)]
    return torch.cat(products), torch.cat(biases) if biases else x.new_zeros(())


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("counts", [[3, 0, 9, 1], [0, 0, 0, 5], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize(("dtype", "bias"), [(torch.float32, True), (torch.bfloat16, False)], ids=str)
@pytest.mark.parametrize("apart", [False, True])
def test_products_and_gradients(
    counts: list[int], dtype: torch.dtype, bias: bool, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of experts without tokens, whose gradients the product leaves unwritten, and of a rank without any; weights
    in one piece or `apart`."""
    leave_empty_groups_unwritten(monkeypatch)
    found = []
    for compute in (lambda x, layer: layer(x, rows_of(counts)), lambda x, layer: one_by_one(x, layer, counts)):
        layer = layer_of(dtype, bias)
        for parameter in layer.parameters() if apart else ():
            parameter.data = parameter.data.clone()
        x = torch.randn(sum(counts), INPUTS, generator=torch.Generator().manual_seed(5)).to(dtype).requires_grad_()
        out, biases = compute(x, layer)
        total = out if biases is None else out + biases
        (total.float() * torch.arange(1.0, OUTPUTS + 1)).sum().backward()
        found.append([total.detach(), x.grad, *(p.grad for p in layer.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-6)


@pytest.mark.usefixtures("megatron")
def test_gradients_of_experts_without_tokens_are_set_to_zero_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the numbers of tokens are: the host waits for nothing."""
    leave_empty_groups_unwritten(monkeypatch)
    stand_in = StandIn()
    with stand_in.running():
        layer = layer_of(torch.bfloat16)
        for parameter in layer.parameters():
            parameter.data = parameter.data.to(DEVICE)
        counts = torch.zeros(EXPERTS, dtype=torch.int64, device=DEVICE)
        counts[1] = 5
        x = torch.ones(5, INPUTS, dtype=torch.bfloat16, device=DEVICE)
        stand_in.counted()
        layer(x, rows_of(counts))[0].sum().backward()
        assert stand_in.counted() == {}
        assert [bool(w.grad.any()) for w in layer.weights()] == [False, True, False, False]
        assert all(bool(w.grad.isfinite().all()) for w in layer.weights())


@pytest.mark.usefixtures("megatron")
def test_frozen_weights_keep_nothing_of_the_input() -> None:
    layer = layer_of(torch.float32).requires_grad_(False)
    x, kept = torch.randn(5, INPUTS, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x, rows_of([2, 1, 0, 2]))[0].sum().backward()
    assert [t.dtype for t in kept] == [torch.int32] and all(p.grad is None for p in layer.parameters())
    torch.testing.assert_close(x.grad[:1], torch.ones(1, OUTPUTS) @ layer.weight0)


@pytest.mark.usefixtures("megatron")
def test_weights_are_copied_only_where_they_lie_apart() -> None:
    layer = layer_of(torch.float32)
    assert layer.stacked_weights().data_ptr() == layer.weight0.data_ptr()
    moved = layer.weight2.data.clone()
    layer.weight2.data = moved  # not seen by first and last alone: whoever moves one weight moves them all
    layer.weight0.data = layer.weight0.data.clone()
    stacked = layer.stacked_weights()
    assert all(torch.equal(stacked[i], w) for i, w in enumerate(layer.weights()))
    assert stacked.data_ptr() not in {w.data_ptr() for w in layer.weights()}


@pytest.mark.usefixtures("megatron")
def test_frozen_experts_do_not_keep_the_memory_of_trained_ones() -> None:
    """Which the distributed optimizer moves into its buffers."""
    layer = layer_of(torch.float32)
    layer.separate_partly_trained()
    assert layer.stacked_weights().data_ptr() == layer.weight0.data_ptr(), "all train: they stay in one piece"
    layer.weight1.requires_grad_(False)
    before = [w.detach().clone() for w in layer.weights()]
    layer.separate_partly_trained()
    assert all(w.untyped_storage().nbytes() == w.nbytes for w in layer.weights())
    assert all(map(torch.equal, before, layer.stacked_weights().unbind()))


def test_which_runs_group_experts() -> None:
    """Unset: all but those with DoRA, NF4 or widths that are no multiple of 16 bytes."""
    spec: Any = SimpleNamespace(hidden_size=64, expert_ffn=24)

    def groups(cfg: SwiftConfig, etp: int, element_bytes: int, torch_products: bool) -> bool:
        return groups_experts(cfg.model, cfg.lora.use_dora, spec, etp, element_bytes, torch_products)

    cfg = SwiftConfig(task="sft")
    assert groups(cfg, 1, 2, True) and groups(cfg, 2, 4, True)
    assert not groups(cfg, 2, 2, True), "12 of 2 bytes"
    assert groups(cfg, 2, 2, False), "Transformer Engine's takes any"
    lora = cfg.replace(train_type="lora")
    assert groups(lora, 1, 2, False) and not groups(lora, 2, 2, False), "adapters are torch's"
    assert not groups(cfg.replace(train_type="qlora"), 1, 2, True)
    assert not groups(cfg.replace(train_type="lora", use_dora=True), 1, 2, False)
    assert not groups(cfg.replace(moe_grouped_gemm=False), 1, 2, False)
    assert not groups(cfg.replace(moe_grouped_gemm_impl="torch"), 2, 2, False)
    [problem] = grouped_width_problems(spec, 2, 2, "--moe_grouped_gemm true")
    assert problem.rule == "needs a width of an expert on each rank that is divisible by 8; here it is 12"
