"""The MoE router: the choice of each token's experts in one kernel, and its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.te.registry import kernel


def _probabilities(logits: Tensor, chosen: Tensor, pre_softmax: bool, scaling: float, function: str) -> Tensor:
    """[.., E]: weights of the chosen experts, 0 elsewhere, in float32."""
    if function == "sigmoid":
        scores = logits.sigmoid() * chosen
        weights = scores / (scores.sum(-1, keepdim=True) + 1e-20) if int(chosen.sum(-1).max()) > 1 else scores
    elif pre_softmax:
        weights = logits.softmax(-1) * chosen
    else:
        weights = logits.masked_fill(~chosen, float("-inf")).softmax(-1)
    return weights * (scaling or 1.0)


@kernel
def fused_topk_with_score_function_fwd(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """(weights [t, E], chosen bool [t, E], what the backward pass needs: the logits)."""
    wide = logits.float()
    ranked = wide.sigmoid() if score_function == "sigmoid" else wide.softmax(-1)
    ranked = ranked if expert_bias is None else ranked + expert_bias
    if group_topk:
        assert num_groups is not None
        grouped = ranked.unflatten(-1, (num_groups, -1))
        best = grouped.topk(topk // group_topk, dim=-1).values.sum(-1).topk(group_topk, dim=-1).indices
        allowed = torch.zeros(grouped.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
        ranked = grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(-2)
    chosen = torch.zeros_like(ranked, dtype=torch.bool).scatter(-1, ranked.topk(topk, dim=-1).indices, True)
    weights = _probabilities(wide, chosen, use_pre_softmax, scaling_factor or 1.0, score_function)
    return weights.to(logits.dtype), chosen, wide.clone()


@kernel
def fused_topk_with_score_function_bwd(*args: Any) -> Tensor:
    """The gradient of the logits: returned by 2.12, written into the fourth argument since."""
    if isinstance(args[0], int):
        _, _, chosen, logits, grad, _, pre_softmax, scaling, function = args
        out = torch.empty_like(grad)
    else:
        chosen, logits, grad, out, _, pre_softmax, scaling, function = args[:8]
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        weights = _probabilities(leaf, chosen.bool(), pre_softmax, scaling or 1.0, function)
        (found,) = torch.autograd.grad(weights, leaf, grad.float())
    result: Tensor = out.copy_(found)
    return result
