"""The test device's stand-ins against torch's own functions and autograd.

Covers: tests/te/kernels_*.py, called as Transformer Engine's Python calls them.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tests.engine.fused_adam import kernels_main, kernels_parts
from tests.te import kernels_matmul as matmul
from tests.te import kernels_misc as misc
from tests.te import kernels_norm as norm
from tests.te import kernels_optimizer as optimizer
from tests.te import kernels_permutation as permutation
from tests.te import kernels_rope as rope
from tests.te import kernels_softmax as softmax
from tests.te.registry import ENUMERATIONS, DType, module

F32 = DType["kFloat32"]


def assert_close(got: Tensor, want: Tensor, limit: float = 2e-6) -> None:
    """Within `limit` of the largest value."""
    assert got.shape == want.shape, (got.shape, want.shape)
    assert float((got - want).abs().max()) <= limit * max(float(want.abs().max()), 1.0)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def gradients(out: Tensor, grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Autograd's."""
    return torch.autograd.grad(out, inputs, grad)


# ------------------------------------------------------------------ products


def test_products_of_a_linear_layer() -> None:
    """Forward TN with bias, input gradient NN, weight gradient NT added to what is there, bias gradient."""
    x, weight, bias = (t.requires_grad_() for t in (randn(5, 2, 8), randn(6, 8, seed=1), randn(6, seed=2)))
    want = F.linear(x, weight, bias)
    space = torch.empty(0)
    tail = (space, 0, False, False)
    out, *_ = matmul.generic_gemm(
        weight.detach(), True, x.detach(), False, None, None, F32, bias.detach(), F32, False, None, False, *tail
    )
    assert_close(out, want.detach())
    grad = randn(5, 2, 6, seed=3)
    dx, dweight, dbias = gradients(want, grad, x, weight, bias)
    got, *_ = matmul.generic_gemm(
        weight.detach(), False, grad, False, None, None, F32, None, F32, False, None, True, *tail
    )
    assert_close(got, dx)
    start = randn(6, 8, seed=4)
    total, summed, *_ = matmul.generic_gemm(
        x.detach(), False, grad, True, start.clone(), None, F32, bias, F32, False, None, True, space, 0, True, False
    )
    assert_close(total, start + dweight)
    assert_close(summed, dbias)


@pytest.mark.parametrize("single", [True, False])
def test_grouped_products(single: bool) -> None:
    """One linear layer a group, an empty group among them."""
    splits, weights = [3, 0, 4], [randn(5, 8, seed=i) for i in range(3)]
    inputs = [randn(n, 8, seed=7 + n) for n in splits]
    outs = [torch.empty(7, 5)] if single else [torch.empty(n, 5) for n in splits]
    empty = [torch.empty(0)] * 3
    matmul.te_general_grouped_gemm(
        weights, True, inputs, False, outs, F32, splits, empty, F32, single, empty, False, empty, 0, False, False, 0
    )
    assert_close(torch.cat(outs), torch.cat([x @ w.t() for x, w in zip(inputs, weights, strict=True)]))


# ------------------------------------------------------------------ norms


@pytest.mark.parametrize("zero_centered", [False, True])
def test_rmsnorm(zero_centered: bool) -> None:
    x, weight, grad = randn(3, 4, 16).requires_grad_(), randn(16, seed=1).requires_grad_(), randn(3, 4, 16, seed=2)
    want = F.rms_norm(x, (16,), weight + zero_centered, 1e-5)
    out, _, inverse = norm.rmsnorm_fwd(x.detach(), weight.detach(), 1e-5, None, None, F32, 0, zero_centered)
    assert_close(out, want.detach())
    got = norm.rmsnorm_bwd(grad, x.detach(), inverse, weight.detach(), 0, zero_centered)
    for mine, theirs in zip(got, gradients(want, grad, x, weight), strict=True):
        assert_close(mine, theirs)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_layernorm(zero_centered: bool) -> None:
    x, weight, bias = (t.requires_grad_() for t in (randn(3, 4, 16), randn(16, seed=1), randn(16, seed=3)))
    grad = randn(3, 4, 16, seed=2)
    want = F.layer_norm(x, (16,), weight + zero_centered, bias, 1e-5)
    plain = [t.detach() for t in (x, weight, bias)]
    out, mean, inverse = norm.layernorm_fwd(*plain, 1e-5, None, None, F32, 0, zero_centered)
    assert_close(out, want.detach())
    got = norm.layernorm_bwd(grad, plain[0], mean, inverse, plain[1], 0, zero_centered)
    for mine, theirs in zip(got, gradients(want, grad, x, weight, bias), strict=True):
        assert_close(mine, theirs)


# ------------------------------------------------------------------ rotary embeddings

FORMAT = ENUMERATIONS["NVTE_QKV_Format"]


def turned(t: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """t [n, h, d] rotated by complex numbers at `positions` [n]; the last two of d stay."""
    d = t.shape[-1] - 2
    angle = positions[:, None].float() * 10.0 ** (-torch.arange(d // 2) / 3.0)
    pairs = t[..., :d].unflatten(-1, (-1, 2)) if interleaved else torch.stack(t[..., :d].chunk(2, -1), -1)
    number = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)[:, None]
    back = torch.view_as_real(number)
    return torch.cat([back.flatten(-2) if interleaved else torch.cat(back.unbind(-1), -1), t[..., d:]], -1)


def frequencies(n: int, d: int, interleaved: bool) -> Tensor:
    """[n, 1, 1, d] as Megatron-Core passes them."""
    angle = torch.arange(n)[:, None].float() * 10.0 ** (-torch.arange(d // 2) / 3.0)
    wide = angle.repeat_interleave(2, -1) if interleaved else torch.cat([angle, angle], -1)
    return wide[:, None, None]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["SBHD", "BSHD", "THD"])
def test_rotation(layout: str, interleaved: bool) -> None:
    """Rows, rows with the batch first, packed documents; the backward pass undoes it."""
    t, positions = randn(12, 2, 8), torch.arange(12)
    bounds = torch.tensor([0, 5, 12]) if layout == "THD" else None
    if layout == "THD":
        positions = torch.cat([torch.arange(5), torch.arange(7)])
    want = turned(t, positions, interleaved)
    given, freqs = (
        (t if layout == "THD" else t[:, None] if layout == "SBHD" else t[None]),
        frequencies(16, 6, interleaved),
    )
    args = (freqs, None, FORMAT[f"NVTE_{layout}"], interleaved, bounds, 1, 0)
    out = rope.fused_rope_forward(given, *args)
    assert_close(out.reshape(12, 2, 8), want)
    assert_close(rope.fused_rope_backward(out, *args), given)


@pytest.mark.parametrize("layout", ["SBHD", "THD"])
def test_rotation_under_context_parallelism(layout: str) -> None:
    """Rank 1 of 2 holds the second and third quarter of a row, or of each document."""
    lengths = [16] if layout == "SBHD" else [4, 12]
    parts, start = [], 0
    for n in lengths:
        parts.append(torch.arange(n // 4, 3 * n // 4))
        start += n
    positions = torch.cat(parts)
    t = randn(len(positions), 2, 8)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    given = t if layout == "THD" else t[:, None]
    out = rope.fused_rope_forward(given, frequencies(16, 6, False), None, FORMAT[f"NVTE_{layout}"], False, bounds, 2, 1)
    assert_close(out.reshape(t.shape), turned(t, positions, False))


# ------------------------------------------------------------------ optimizer


@pytest.mark.parametrize("remainder", [False, True])
def test_adam(remainder: bool) -> None:
    """Three steps of torch's AdamW; with remainders the main weight is in the bfloat16 and its 16 bits."""
    start = randn(33)
    reference = torch.nn.Parameter(start.clone())
    adam = torch.optim.AdamW([reference], lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
    m, v, flag = torch.zeros(33), torch.zeros(33), torch.zeros(1)
    weight, low = optimizer.parted(start) if remainder else (start.clone(), None)
    for step in range(1, 4):
        reference.grad = randn(33, seed=step)
        adam.step()
        lists = [[reference.grad], [weight], [m], [v]] + ([[low]] if remainder else [])
        run = optimizer.multi_tensor_adam_param_remainder if remainder else optimizer.multi_tensor_adam
        run(2048, flag, lists, 0.1, 0.8, 0.9, 1e-6, step, 1, True, 0.2)
    assert_close(optimizer.joined(weight, low) if remainder else weight, reference.detach(), 1e-6)


def test_adam_that_can_skip() -> None:
    """Gradients times a factor, which are written back; nothing happens where the flag is 1."""
    plain, ours = ([[randn(9, seed=1)], [randn(9)], [torch.zeros(9)], [torch.zeros(9)]] for _ in range(2))
    plain[0][0] *= 0.25
    optimizer.multi_tensor_adam(2048, torch.zeros(1), plain, 0.5, 0.8, 0.9, 1e-6, 1, 1, True, 0.2)
    rule = (torch.tensor(0.5), 0.8, 0.9, 1e-6, torch.ones(1, dtype=torch.int), 1, True, 0.2, torch.tensor([0.25]))
    before = [[t.clone() for t in one] for one in ours]
    for flag, want in ((1, before), (0, plain)):
        optimizer.multi_tensor_adam_capturable(2048, torch.tensor([flag], dtype=torch.int), ours, *rule)
        assert all(
            torch.equal(a, b) for one, other in zip(ours, want, strict=True) for a, b in zip(one, other, strict=True)
        )


def test_remainders_are_those_of_the_kernel() -> None:
    """Against the kernel's rule written in numpy (tests/engine/fused_adam.py), negative numbers and ties included."""
    main = torch.cat([randn(200) * 100, torch.tensor([1.0 + 2**-8, -1.0 - 2**-8, 0.0, -0.0, 2**-120])])
    high, low = optimizer.parted(main)
    theirs = kernels_parts(main)
    assert torch.equal(optimizer.joined(high, low).view(torch.int32), main.view(torch.int32))
    assert torch.equal(kernels_main(high, low).view(torch.int32), main.view(torch.int32))
    assert torch.equal(high.view(torch.int16), theirs[0].view(torch.int16)) and torch.equal(low, theirs[1])


def test_norm_and_scale() -> None:
    lists = [[randn(5), randn(3, 4)]]
    total, each = optimizer.multi_tensor_l2norm(2048, torch.zeros(1), lists, True)
    flat = torch.cat([t.flatten() for t in lists[0]])
    assert_close(total, flat.norm().view(1))
    assert_close(each, torch.stack([t.norm() for t in lists[0]]))
    target = [torch.empty(5), torch.empty(3, 4)]
    optimizer.multi_tensor_scale(2048, torch.zeros(1), [lists[0], target], 0.25)
    assert_close(target[1], lists[0][1] / 4)


# ------------------------------------------------------------------ experts


def test_permutation_and_back() -> None:
    """Tokens by expert, in the tokens' order; sums weighted by probabilities and their gradients as autograd's."""
    mask = torch.rand(9, 4, generator=torch.Generator().manual_seed(1)) > 0.5
    tokens, probs = randn(9, 5), (torch.rand(9, 4) * mask)
    n = int(mask.sum())
    ids = permutation.make_row_id_map(mask, 9, 4)
    out, _, moved = permutation.permute_with_mask_map(tokens, ids, probs, None, None, 9, 4, n, 5, 0)
    pairs = [(t, e) for e in range(4) for t in range(9) if mask[t, e]]
    assert_close(out, torch.stack([tokens[t] for t, _ in pairs]))
    assert_close(moved, torch.stack([probs[t, e] for t, e in pairs]))
    copies, weights = randn(n, 5, seed=2).requires_grad_(), probs.clone().requires_grad_()
    want = torch.zeros(9, 5)
    for row, (t, e) in enumerate(pairs):
        want = want.index_add(0, torch.tensor([t]), copies[row : row + 1] * weights[t, e])
    got, back = permutation.unpermute_with_mask_map(copies.detach(), ids, probs, moved, None, 9, 4, 5)
    assert_close(got, want.detach())
    assert_close(back, probs)
    grad = randn(9, 5, seed=3)
    mine = permutation.unpermute_with_mask_map_bwd_with_merging_probs(
        grad, ids, copies.detach(), probs, None, 9, 4, n, 5
    )
    for one, theirs in zip(mine, gradients(want, grad, copies, weights), strict=True):
        assert_close(one, theirs)


def test_permutation_with_padding() -> None:
    """Each expert's rows begin at a multiple of 4: offsets are added, padding is 0."""
    mask = torch.tensor([[True, False], [True, True], [False, True]])
    ids = permutation.make_row_id_map(mask, 3, 2)
    out, *_ = permutation.permute_with_mask_map(
        torch.tensor([[1.0], [2.0], [3.0]]), ids, None, None, torch.tensor([0, 2]), 3, 2, 8, 1, 0
    )
    assert out.flatten().tolist() == [1, 2, 0, 0, 2, 3, 0, 0]


def test_chunks_in_another_order() -> None:
    rows, probs = torch.arange(6.0)[:, None], torch.arange(6.0)
    ids = permutation.make_chunk_sort_map(torch.tensor([1, 3, 2]), torch.tensor([2, 0, 1]), 6, 3)
    out, moved = permutation.sort_chunks_by_map(rows, ids, probs, 6, 1, True)
    assert out.flatten().tolist() == moved.tolist() == [4, 5, 0, 1, 2, 3]
    assert torch.equal(permutation.sort_chunks_by_map(out, ids, None, 6, 1, False)[0], rows)


# ------------------------------------------------------------------ softmax, conversions


@pytest.mark.parametrize("kind", ["", "masked_", "upper_triang_masked_", "aligned_causal_masked_"])
def test_softmax(kind: str) -> None:
    q = 6 if kind == "upper_triang_masked_" else 4
    x = randn(2, 3, q, 6).requires_grad_()
    hidden = torch.zeros(q, 6, dtype=torch.bool)
    if kind == "masked_":
        hidden = randn(q, 6, seed=5) > 0.3
    elif kind:
        hidden = torch.ones(q, 6, dtype=torch.bool).triu(1 + 6 - q)
    want = (x * 0.5).masked_fill(hidden, float("-inf")).softmax(-1)
    forward = getattr(softmax, f"scaled_{kind}softmax_forward")
    extra = (hidden.expand(2, 1, q, 6),) if kind == "masked_" else ()
    out = forward(x.detach(), *extra, 0.5)
    assert_close(out, want.detach())
    grad = randn(2, 3, q, 6, seed=6)
    assert_close(getattr(softmax, f"scaled_{kind}softmax_backward")(grad, out, 0.5), gradients(want, grad, x)[0])


def test_packed_to_rows_and_back() -> None:
    t, bounds = randn(7, 2), torch.tensor([0, 3, 7])
    wide = misc.convert_thd_to_bshd(t, bounds, 2, 5)
    assert torch.equal(wide, torch.nn.utils.rnn.pad_sequence([t[:3], t[3:], torch.zeros(5, 2)], batch_first=True)[:2])
    assert torch.equal(misc.convert_bshd_to_thd(wide, bounds, 7), t)


def test_padding_of_groups() -> None:
    rows, out, back = torch.arange(1.0, 6.0)[:, None], torch.full((8, 1), -1.0), torch.empty(5, 1)
    misc.fused_multi_row_padding(rows, out, [2, 3], [4, 4])
    assert out.flatten().tolist() == [1, 2, 0, 0, 3, 4, 5, 0]
    misc.fused_multi_row_unpadding(out, back, [4, 4], [2, 3])
    assert torch.equal(back, rows)


def test_a_function_without_a_stand_in_is_named() -> None:
    """And the module brings each kernel by its name."""
    stand_in: Any = module("2.12.0")
    with pytest.raises(AssertionError, match=r"transformer_engine_torch\.newton_schulz"):
        stand_in.newton_schulz(1)
    assert stand_in.rmsnorm_fwd.__name__ == "rmsnorm_fwd" and "transformer_engine_torch" not in sys.modules
