"""The router's own choice of experts against transformers' routers; counts without padding; a bias that precision
leaves alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

EXPERTS, TOPK, TOKENS, HIDDEN = 16, 5, 64, 12


def gate(model_type: str, **fields: Any) -> tuple[Any, Tensor, Tensor]:
    """(transformers' router of the type, hidden states [t, h], its answer as weights [t, E] with 0 where an expert is
    not chosen)."""
    from transformers import AutoConfig
    from transformers.models import deepseek_v2, deepseek_v3, glm4_moe

    classes = {
        "deepseek_v2": deepseek_v2.modeling_deepseek_v2.DeepseekV2TopkRouter,
        "deepseek_v3": deepseek_v3.modeling_deepseek_v3.DeepseekV3TopkRouter,
        "glm4_moe": glm4_moe.modeling_glm4_moe.Glm4MoeTopkRouter,
    }
    torch.manual_seed(5)
    config = AutoConfig.for_model(
        model_type,
        hidden_size=HIDDEN,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOPK,
        num_attention_heads=2,
        **fields,
    )
    module = classes[model_type](config)
    module.weight.data = torch.randn(EXPERTS, HIDDEN)
    if hasattr(module, "e_score_correction_bias"):
        module.e_score_correction_bias.data = 0.3 * torch.randn(EXPERTS)
    hidden = torch.randn(TOKENS, HIDDEN)
    _, weights, chosen = module(hidden)
    return module, hidden, torch.zeros(TOKENS, EXPERTS).scatter(1, chosen, weights)


@pytest.mark.parametrize("groups, left", [(1, 1), (4, 2), (8, 4), (2, 1)])
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe"])
def test_biased_sigmoids(model_type: str, normalized: bool, groups: int, left: int) -> None:
    from megaswift.engine.megatron.layers.moe.router import RoutingRule, choose_experts

    module, hidden, want = gate(
        model_type, n_group=groups, topk_group=left, norm_topk_prob=normalized, routed_scaling_factor=2.5
    )
    how = RoutingRule("sigmoid", TOPK, groups, left, 2, normalized, 2.5)
    weights, chosen = choose_experts(hidden @ module.weight.T, how, module.e_score_correction_bias)
    torch.testing.assert_close(weights, want.detach(), rtol=1e-6, atol=1e-6)
    assert torch.equal(chosen, want != 0)


@pytest.mark.parametrize("groups, left", [(4, 2), (8, 4)])
def test_softmax_in_groups(groups: int, left: int) -> None:
    from megaswift.engine.megatron.layers.moe.router import RoutingRule, choose_experts

    method = "group_limited_greedy"
    module, hidden, want = gate(
        "deepseek_v2", n_group=groups, topk_group=left, topk_method=method, routed_scaling_factor=16.0
    )
    weights, chosen = choose_experts(
        hidden @ module.weight.T, RoutingRule("softmax", TOPK, groups, left, 1, False, 16.0), None
    )
    torch.testing.assert_close(weights, want.detach(), rtol=1e-6, atol=1e-6)
    assert torch.equal(chosen, want != 0)


@pytest.mark.parametrize("least", [1e-12, 0.4])
def test_biased_softmax(least: float) -> None:
    """ERNIE's router, whose bias counts for the choice alone; with a floor that some tokens' sums are below."""
    from transformers import AutoConfig
    from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter

    from megaswift.engine.megatron.layers.moe.router import RoutingRule, choose_experts

    torch.manual_seed(5)
    sizes = {"hidden_size": HIDDEN, "moe_num_experts": EXPERTS, "moe_k": TOPK, "moe_norm_min": least}
    module = Ernie4_5_MoeTopKRouter(AutoConfig.for_model("ernie4_5_moe", **sizes))
    module.weight.data = 0.2 * torch.randn(EXPERTS, HIDDEN)
    bias = 0.1 * torch.randn(EXPERTS)
    module.moe_statics.e_score_correction_bias.data = bias[None]
    hidden = torch.randn(TOKENS, HIDDEN)
    _, weights, chosen = module(hidden)
    want = torch.zeros(TOKENS, EXPERTS).scatter(1, chosen, weights)
    how = RoutingRule("softmax", TOPK, normalized=True, least_sum=least)
    got, picks = choose_experts(hidden @ module.weight.T, how, bias)
    torch.testing.assert_close(got, want.detach(), rtol=1e-6, atol=1e-6)
    assert torch.equal(picks, want != 0)
    assert not torch.equal(picks, choose_experts(hidden @ module.weight.T, how, None)[1])
    assert bool((got.sum(-1) < 0.999).any()) == (least == 0.4)


def test_a_choice_by_hand() -> None:
    """Two groups of two: the second has the better best two together, the first the best one."""
    from megaswift.engine.megatron.layers.moe.router import RoutingRule, choose_experts

    logits = torch.tensor([[3.0, -3.0, 2.0, 1.0]])
    one, _ = choose_experts(logits, RoutingRule("sigmoid", 1, 2, 1, 1), None)
    two, _ = choose_experts(logits, RoutingRule("sigmoid", 1, 2, 1, 2), None)
    assert one.nonzero().tolist() == [[0, 0]] and two.nonzero().tolist() == [[0, 2]]
    biased, _ = choose_experts(logits, RoutingRule("sigmoid", 1), torch.tensor([0.0, 5.0, 0.0, 0.0]))
    assert (
        float(biased[0, 1]) == pytest.approx(float(torch.sigmoid(torch.tensor(-3.0)))) and int((biased != 0).sum()) == 1
    )


def test_padding_is_not_counted() -> None:
    from megaswift.engine.megatron.layers.moe.router import AuxLossTopKRouter

    seen = SimpleNamespace(enable_expert_bias=True, local_tokens_per_expert=torch.zeros(3))
    router = AuxLossTopKRouter.__new__(AuxLossTopKRouter)
    torch.nn.Module.__init__(router)
    router.__dict__.update(seen.__dict__)
    chosen = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1]], dtype=torch.bool)
    router._apply_expert_bias(chosen, torch.tensor([False, True, False]))
    assert router.local_tokens_per_expert.tolist() == [2.0, 1.0, 1.0]
