"""The router's fused kernel on the test device beside Megatron-Core's function in torch operations.

Covers: tests/te/kernels_router.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megaswift.engine.megatron  # noqa: F401 - before megatron.core
from tests.te.kernels_router import fused_topk_with_score_function_bwd, fused_topk_with_score_function_fwd

CASES: dict[str, dict[str, Any]] = {
    "softmax of all": {"use_pre_softmax": True},
    "softmax of the chosen": {"use_pre_softmax": False},
    "sigmoid": {"score_function": "sigmoid"},
    "sigmoid with bias": {"score_function": "sigmoid", "bias": True, "scaling_factor": 2.5},
    "groups": {"score_function": "sigmoid", "num_groups": 4, "group_topk": 2},
    "groups of softmax": {"use_pre_softmax": True, "num_groups": 4, "group_topk": 2, "scaling_factor": 1.5},
}


@pytest.mark.wide
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("newer", [False, True])
def test_routing(name: str, newer: bool) -> None:
    """Weights, choice and gradient; both releases' ways to call the backward pass."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    settings = {
        "use_pre_softmax": False,
        "num_groups": None,
        "group_topk": None,
        "scaling_factor": None,
        "score_function": "softmax",
    } | CASES[name]
    torch.manual_seed(0)
    bias = torch.randn(16) / 10 if settings.pop("bias", False) else None
    logits = torch.randn(24, 16, requires_grad=True)
    want, picks = topk_routing_with_score_function(logits, 4, expert_bias=bias, **settings)
    grad = torch.randn_like(want)
    want.backward(grad)
    weights, chosen, saved = fused_topk_with_score_function_fwd(logits.detach(), 4, expert_bias=bias, **settings)
    pre, scaling, function = (settings[k] for k in ("use_pre_softmax", "scaling_factor", "score_function"))
    if newer:
        found = torch.empty_like(grad)
        fused_topk_with_score_function_bwd(chosen, saved, grad, found, 4, pre, scaling, function, False, 0)
    else:
        found = fused_topk_with_score_function_bwd(24, 16, chosen, saved, grad, 4, pre, scaling, function)
    assert torch.equal(chosen, picks)
    torch.testing.assert_close(weights, want.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found, logits.grad, rtol=1e-5, atol=1e-6)
