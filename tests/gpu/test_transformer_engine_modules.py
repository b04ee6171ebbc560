"""The first thing on a new GPU machine: does this build of Transformer Engine compute what torch does?

Each module in bfloat16 against torch in float32; FP8 within what eight bits allow.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
HALF, EIGHT_BITS = 2e-2, 8e-2
TOKENS, BATCH, HIDDEN, HEADS, GROUPS, HEAD = 256, 2, 512, 8, 2, 64


@pytest.fixture(scope="module")
def te() -> Any:
    return pytest.importorskip("transformer_engine.pytorch")


def far(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||."""
    return float((got.float() - want.float()).norm() / want.float().norm())


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)


def reference_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, grouped; [tokens, heads, size] of one document in float32."""
    heads_first = (t.float().transpose(0, 1)[None] for t in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


@pytest.mark.parametrize("norm", [False, True])
def test_linear(te: Any, norm: bool) -> None:
    """Output and both gradients, with and without an RMSNorm before the product."""
    x = normal(TOKENS, HIDDEN).requires_grad_()
    kind = te.LayerNormLinear if norm else te.Linear
    layer = kind(
        HIDDEN, 3 * HIDDEN, bias=False, params_dtype=torch.bfloat16, **({"normalization": "RMSNorm"} if norm else {})
    )
    y = layer(x)
    gradient = normal(*y.shape, seed=1)
    y.backward(gradient)
    wide, weight = (t.detach().float().requires_grad_() for t in (x, layer.weight))
    fed = F.rms_norm(wide, (HIDDEN,), layer.layer_norm_weight.detach().float(), 1e-5) if norm else wide
    want = fed @ weight.t()
    want.backward(gradient.float())
    assert x.grad is not None and wide.grad is not None and weight.grad is not None
    assert far(y, want) < HALF
    assert far(x.grad, wide.grad) < HALF
    assert far(layer.weight.grad, weight.grad) < HALF


@pytest.mark.parametrize("packed", [False, True])
def test_attention(te: Any, packed: bool) -> None:
    """Rows of one length, and documents of several lengths in one row."""
    bounds = [0, 100, TOKENS, BATCH * TOKENS] if packed else [0, TOKENS, BATCH * TOKENS]
    q, k, v = (normal(BATCH * TOKENS, h, HEAD, seed=h).requires_grad_() for h in (HEADS, GROUPS, GROUPS + 1))
    v = v[:, :GROUPS].detach().requires_grad_()
    attention = te.DotProductAttention(
        HEADS,
        HEAD,
        num_gqa_groups=GROUPS,
        attn_mask_type="padding_causal" if packed else "causal",
        qkv_format="thd" if packed else "bshd",
        attention_dropout=0.0,
    )
    if packed:
        starts = torch.tensor(bounds, device="cuda", dtype=torch.int32)
        longest = max(b - a for a, b in zip(bounds, bounds[1:], strict=False))
        got = attention(q, k, v, cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=longest, max_seqlen_kv=longest)
    else:
        got = attention(*(t.view(BATCH, TOKENS, -1, HEAD) for t in (q, k, v)))
    got = got.reshape(BATCH * TOKENS, HEADS, HEAD)
    gradient = normal(*got.shape, seed=9)
    got.backward(gradient)
    wide = [t.detach().float().requires_grad_() for t in (q, k, v)]
    documents = zip(bounds, bounds[1:], strict=False)
    want = torch.cat([reference_attention(*(t[a:b] for t in wide)) for a, b in documents])
    want.backward(gradient.float())
    assert far(got, want) < HALF
    for ours, theirs in zip((q, k, v), wide, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert far(ours.grad, theirs.grad) < HALF


@pytest.mark.parametrize("name", ["DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"])
def test_fp8_linear(te: Any, name: str) -> None:
    from transformer_engine.common import recipe

    x = normal(TOKENS, HIDDEN)
    layer = te.Linear(HIDDEN, 3 * HIDDEN, bias=False, params_dtype=torch.bfloat16)
    for _ in range(2):  # delayed scaling takes the first pass's largest values
        with te.fp8_autocast(enabled=True, fp8_recipe=getattr(recipe, name)()):
            y = layer(x)
    assert far(y, x.float() @ layer.weight.detach().float().t()) < EIGHT_BITS


def test_grouped_linear(te: Any) -> None:
    """Experts with different numbers of tokens, one of them with none."""
    counts = [100, 0, 28, 128]
    x = normal(sum(counts), HIDDEN)
    layer = te.GroupedLinear(len(counts), HIDDEN, 2 * HIDDEN, bias=False, params_dtype=torch.bfloat16)
    got = layer(x, counts)
    weights = [getattr(layer, f"weight{i}").detach().float() for i in range(len(counts))]
    rows = x.float().split(counts)
    assert far(got, torch.cat([row @ w.t() for row, w in zip(rows, weights, strict=True)])) < HALF
