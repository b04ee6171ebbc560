"""Fused attention's stand-ins, and those of context parallelism over packed rows, against a softmax over a matrix and
autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.te import kernels_attention as attention
from tests.te import kernels_context as context
from tests.te.registry import ENUMERATIONS
from tests.te.test_kernels import assert_close, gradients, randn

# ------------------------------------------------------------------ attention


def options(names: str, **given: Any) -> list[Any]:
    """Arguments by position, None where a test gives none."""
    return [given.get(name) for name in names.split()]


def attend(release: str, direction: str, layout: str, mask: str, **given: Any) -> Any:
    """A call as the release makes it."""
    names = (attention._NAMES if release == "2.12.0" else attention._NEWER)[direction]
    settings = {
        "scale": 0.3,
        "dropout": 0.0,
        "training": True,
        "window": (-1, -1),
        "bottom_right": False,
        "layout": ENUMERATIONS["NVTE_QKV_Layout"][f"NVTE_{'_'.join([layout] * 3)}"],
        "mask": ENUMERATIONS["NVTE_Mask_Type"][f"NVTE_{mask}_MASK"],
        "softmax": ENUMERATIONS["NVTE_Softmax_Type"]["NVTE_VANILLA_SOFTMAX"],
    }
    run = attention.fused_attn_fwd if direction == "forward" else attention.fused_attn_bwd
    return run(*options(names, **settings | given))


def plain(q: Tensor, k: Tensor, v: Tensor, window: int = -1, sinks: Tensor | None = None) -> Tensor:
    """Causal attention of one sequence [s, h, d] by softmax over a matrix; a sink is one more column."""
    groups = q.shape[1] // k.shape[1]
    scores = 0.3 * torch.einsum("shd,thd->hst", q, k.repeat_interleave(groups, 1))
    n = q.shape[0]
    seen = torch.ones(n, n).tril().bool()
    if window >= 0:
        seen &= ~torch.ones(n, n).tril(-window - 1).bool()
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, n, 1)], -1)
    p = scores.softmax(-1)[..., :n]
    return torch.einsum("hst,thd->shd", p, v.repeat_interleave(groups, 1))


@pytest.mark.parametrize("window", [-1, 3])
@pytest.mark.parametrize("layout", ["SBHD", "BSHD", "THD"])
def test_attention(layout: str, window: int, release: str) -> None:
    """Grouped queries, values of another width, windows; packed documents with padding between them."""
    q, k, v = (t.requires_grad_() for t in (randn(12, 4, 6), randn(12, 2, 6, seed=1), randn(12, 2, 5, seed=2)))
    grad, given = randn(12, 4, 5, seed=3), {}
    spans = [(0, 12)]
    if layout == "THD":
        spans = [(0, 4), (6, 11)]
        cu, padded = torch.tensor([0, 4, 9]), torch.tensor([0, 6, 12])
        given = {"cu_q": cu, "cu_kv": cu, "cu_q_padded": padded, "cu_kv_padded": padded}
    out = torch.zeros(12, 4, 5)
    want = [torch.zeros_like(t) for t in (q, k, v)]
    for a, b in spans:
        one = plain(q[a:b], k[a:b], v[a:b], window)
        out[a:b] = one.detach()
        for total, part in zip(want, gradients(one, grad[a:b], q, k, v), strict=True):
            total += part

    def shaped(t: Tensor) -> Tensor:
        t = t.detach()
        return t if layout == "THD" else t[:, None] if layout == "SBHD" else t[None]

    given |= {"q": shaped(q), "k": shaped(k), "v": shaped(v), "window": (window, 0 if window >= 0 else -1)}
    mask = "PADDING_CAUSAL" if layout == "THD" else "CAUSAL"
    got, *saved = attend(release, "forward", layout, mask, **given)
    assert_close(got, shaped(out))
    got_grads = attend(release, "backward", layout, mask, **given, o=got, d_o=shaped(grad), saved=saved)
    for mine, theirs in zip(got_grads[:3], want, strict=True):
        assert_close(mine, shaped(theirs))


def test_attention_sinks(release: str) -> None:
    """A learnable logit a head in the softmax's sum, and its gradient."""
    q, k, v, sinks = (
        t.requires_grad_() for t in (randn(7, 4, 6), randn(7, 4, 6, seed=1), randn(7, 4, 6, seed=2), randn(4))
    )
    grad = randn(7, 4, 6, seed=3)
    want = plain(q, k, v, sinks=sinks)
    kind = ENUMERATIONS["NVTE_Softmax_Type"]["NVTE_LEARNABLE_SOFTMAX"]
    given = {name: t.detach()[:, None] for name, t in (("q", q), ("k", k), ("v", v))}
    given |= {"softmax": kind, "sinks": sinks.detach().view(1, 4, 1, 1)}
    got, *saved = attend(release, "forward", "SBHD", "CAUSAL", **given)
    assert_close(got[:, 0], want.detach())
    grads = attend(release, "backward", "SBHD", "CAUSAL", **given, o=got, d_o=grad[:, None], saved=saved)
    mine = [*(g[:, 0] for g in grads[:3]), grads[4].view(-1)]
    for one, theirs in zip(mine, gradients(want, grad, q, k, v, sinks), strict=True):
        assert_close(one, theirs)


def test_a_call_of_another_length_is_refused(release: str) -> None:
    with pytest.raises(AssertionError, match="arguments, not"):
        attention.fused_attn_fwd(1, 2, 3)


# ------------------------------------------------------------------ context parallelism, packed

BOUNDS = torch.tensor([0, 4, 10])


def test_halves_of_documents() -> None:
    t = torch.arange(10.0)[:, None, None].expand(10, 2, 3)
    assert context.thd_read_half_tensor(t, BOUNDS, 0)[:, 0, 0].tolist() == [0, 1, 4, 5, 6]
    assert context.thd_read_half_tensor(t, BOUNDS, 1)[:, 0, 0].tolist() == [2, 3, 7, 8, 9]
    lse = torch.arange(10.0)[None]
    assert context.thd_read_second_half_lse(lse, BOUNDS, True, 10).tolist() == [[2, 3, 7, 8, 9]]


def test_order_of_ranks_and_of_sequences() -> None:
    """Documents of 4 and 8 tokens on two ranks, by hand: rank 0 has the first and the last quarter of each."""
    bounds, tokens = torch.tensor([0, 4, 12], dtype=torch.int32), torch.arange(12.0)[:, None]
    by_rank = context.thd_sequence_order_to_cp_rank_order(tokens, bounds, 2, 12)
    assert by_rank[:, 0].tolist() == [0, 3, 4, 5, 10, 11, 1, 2, 6, 7, 8, 9]
    assert torch.equal(context.thd_cp_rank_order_to_sequence_order(by_rank, bounds, 2, 12), tokens)


@pytest.mark.parametrize("second", [False, True])
def test_outputs_of_two_steps_join(second: bool) -> None:
    """Softmax over keys in two parts, the second seen by all queries or by each document's second half: as over all
    keys."""
    scores, values = randn(1, 10, 6), randn(6, 1, 3, seed=1)
    late = torch.zeros(10, dtype=torch.bool)
    late[[2, 3, 7, 8, 9] if second else slice(None)] = True
    parts = (scores[:, :, :4], scores[:, late][:, :, 4:])
    lse, lse_step = (p.logsumexp(-1) for p in parts)
    out, step = (
        torch.einsum("hst,thd->shd", p.softmax(-1), v) for p, v in zip(parts, (values[:4], values[4:]), strict=True)
    )
    seen = scores.clone()
    seen[:, ~late, 4:] = float("-inf")
    want = torch.einsum("hst,thd->shd", seen.softmax(-1), values)
    total = lse.clone()
    if second:
        context.thd_second_half_lse_correction(total, lse_step, BOUNDS, True)
    else:
        total = torch.logaddexp(total, lse_step)
    joined = torch.zeros(10, 1, 3)
    context.thd_out_correction(joined, out, total, lse, BOUNDS, False, True)
    context.thd_out_correction(joined, step, total, lse_step, BOUNDS, second, True)
    assert_close(joined, want)
    context.thd_out_correction(out, step, lse, total, lse_step, BOUNDS, second, True)  # as 2.20 calls it
    assert_close(out, want)


@pytest.mark.parametrize(
    ("first", "second", "source", "want"),
    [
        ("add", "copy", range(10), [0, 2, 2, 3, 8, 10, 12, 7, 8, 9]),
        ("copy", "none", range(5), [0, 1, 2, 3, 2, 3, 4, 7, 8, 9]),
        ("none", "add", range(5), [0, 1, 2, 4, 4, 5, 6, 9, 11, 13]),
        ("zero", "copy", range(5), [0, 0, 0, 1, 0, 0, 0, 2, 3, 4]),
        ("copy", "zero", range(5), [0, 1, 0, 0, 2, 3, 4, 0, 0, 0]),
    ],
)
def test_gradients_of_halves(first: str, second: str, source: range, want: list[int]) -> None:
    """Worked by hand: tokens 0 to 9 hold their numbers, documents of 4 and 6."""
    grad = torch.arange(10.0)[:, None, None].clone()
    context.thd_grad_correction(grad, torch.tensor([float(x) for x in source])[:, None, None], BOUNDS, first, second)
    assert grad.flatten().tolist() == want


def test_partitioned_indices() -> None:
    got = [context.thd_get_partitioned_indices(torch.tensor([0, 4, 12]), 12, 2, r).tolist() for r in range(2)]
    assert got == [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]
