"""Gated delta nets against transformers' torch functions and whole layers in float64; documents of a packed row against
the same documents apart, wherever they begin and however short they are."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextGatedDeltaNet,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from megaswift.bisection.precision import Widened
from megaswift.engine.gated_delta import (
    CHUNK,
    GatedDeltaWeights,
    TokenDocuments,
    causal_convolution,
    gated_delta_net,
    gated_delta_rule,
    rule_by_kernel,
)

TOLERANCE = 1e-9
GROUPS, PER_GROUP, KEY_WIDTH, VALUE_WIDTH, TAPS = 2, 3, 8, 6, 4
LAYERS = {
    "qwen3_next": (Qwen3NextConfig, Qwen3NextGatedDeltaNet),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5GatedDeltaNet),
}
BOUNDS = [0, 1, 3, 3, 20, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 4 * CHUNK + 10, 4 * CHUNK + 12, 5 * CHUNK + 3]
"""A document of one token, first and later; documents shorter than the convolution; an empty one; some that end at a
chunk's end, cross it or fill whole chunks."""
TOGETHER = TokenDocuments.of_bounds(BOUNDS, torch.device("cpu"))


def rule_inputs(length: int, per_group: int = PER_GROUP) -> list[Tensor]:
    """Query, key, value, decay and write strength of two rows, float64."""
    torch.manual_seed(length)
    shapes = [(GROUPS, KEY_WIDTH), (GROUPS, KEY_WIDTH), (GROUPS, per_group, VALUE_WIDTH)]
    tensors = [torch.randn(2, length, *shape, dtype=torch.float64) for shape in shapes]
    tensors.append(-(torch.rand(2, length, GROUPS, per_group, dtype=torch.float64) ** 4) * 8)
    tensors.append(torch.rand(2, length, GROUPS, per_group, dtype=torch.float64))
    return [t.requires_grad_() for t in tensors]


def hugging_face_rule(rule: Any, inputs: Sequence[Tensor]) -> Tensor:
    query, key, value, decay, write = inputs
    with Widened():
        out, _ = rule(
            query, key, value.flatten(2, 3), g=decay.flatten(2), beta=write.flatten(2), use_qk_l2norm_in_kernel=True
        )
    return out.view_as(value)


def kernel_of_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
) -> tuple[Tensor, None]:
    """`fla.ops.gated_delta_rule.chunk_gated_delta_rule` of release 0.6.0: its arguments and what its text asks of them,
    computed by transformers' function for one document."""
    assert q.shape == k.shape and q.shape[:2] == v.shape[:2] == g.shape[:2]
    assert g.shape == beta.shape == v.shape[:3] and v.shape[2] % q.shape[2] == 0
    assert use_qk_l2norm_in_kernel and not use_beta_sigmoid_in_kernel and not output_final_state
    assert (scale, initial_state, chunk_indices, cp_context) == (None,) * 4
    bounds = [0, q.shape[1]]
    if cu_seqlens is not None:
        assert q.shape[0] == 1 and cu_seqlens.dtype == torch.int64 and torch.equal(cu_seqlens, cu_seqlens_cpu)
        bounds = cu_seqlens.tolist()
        assert bounds[0] == 0 and bounds[-1] == q.shape[1] and bounds == sorted(set(bounds))
    outs = []
    for start, end in pairwise(bounds):
        parts = (t[:, start:end] for t in (q, k, v, g, beta))
        with Widened():
            outs.append(torch_chunk_gated_delta_rule(*parts, use_qk_l2norm_in_kernel=True)[0])
    return torch.cat(outs, dim=1), None


@pytest.mark.parametrize("documents", [None, TOGETHER], ids=["rows", "documents"])
def test_kernels_get_what_they_ask_for(documents: TokenDocuments | None) -> None:
    """Two rows, three value heads for each key head."""
    inputs = rule_inputs(BOUNDS[-1])
    ours = gated_delta_rule(*inputs, documents)
    assert_equal([rule_by_kernel(kernel_of_fla, *inputs, documents), ours], inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [False, True], ids=["rows", "documents"])
def test_kernels_compute_what_torch_does(documents: bool) -> None:
    """bfloat16 on a GPU, output and gradients."""
    kernel = pytest.importorskip("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    generator = torch.Generator("cuda").manual_seed(3)
    shapes = [(2, 64), (2, 64), (2, 3, 64), (2, 3), (2, 3)]
    drawn = [torch.randn(1, BOUNDS[-1], *shape, device="cuda", generator=generator) for shape in shapes]
    drawn[3] = -(drawn[3].sigmoid() ** 4) * 8
    drawn[4] = drawn[4].sigmoid()
    inputs = [t.bfloat16().requires_grad_() for t in drawn]
    of_row = TokenDocuments.of_bounds(BOUNDS, torch.device("cuda")) if documents else None
    want = gated_delta_rule(*(t.float() for t in inputs), of_row)
    got = rule_by_kernel(kernel, *inputs, of_row).float()
    weight = torch.randn(want.shape, device="cuda", generator=generator)
    pairs = [(got, want), *zip(*(torch.autograd.grad((o * weight).sum(), inputs) for o in (got, want)), strict=True)]
    for number, (ours, theirs) in enumerate(pairs):
        distance = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        assert distance < 1e-2, f"tensor {number}: {distance:.1e}"


def assert_equal(outs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """The same values, and the same gradient of every input; each within TOLERANCE of the tensor's largest value."""
    weight = torch.randn(outs[0].shape, dtype=outs[0].dtype, generator=torch.Generator().manual_seed(1))
    pairs = [outs, *zip(*(torch.autograd.grad((out * weight).sum(), inputs) for out in outs), strict=True)]
    for number, (ours, theirs) in enumerate(pairs):
        assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max(), f"tensor {number}"


@functools.cache
def layer(kind: str) -> Any:
    """transformers' layer, float64, with decays from none to all within a token."""
    configuration, module = LAYERS[kind]
    torch.manual_seed(7)
    made = module(
        configuration(
            hidden_size=32,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
            linear_num_key_heads=GROUPS,
            linear_num_value_heads=GROUPS * PER_GROUP,
            linear_key_head_dim=KEY_WIDTH,
            linear_value_head_dim=VALUE_WIDTH,
            linear_conv_kernel_dim=TAPS,
            rms_norm_eps=1e-5,
        ),
        0,
    ).double()
    with torch.no_grad():
        made.norm.weight.uniform_(0.5, 1.5)
        made.dt_bias.uniform_(-3, 3)
        made.A_log.copy_(torch.linspace(-6, 2.7, len(made.A_log)))
    return made


def by_group(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Parts that each have all key heads' rows, joined key head by key head: [..., g, widths of a head, ...]."""
    return torch.cat([part.unflatten(dim, (GROUPS, -1)) for part in parts], dim=dim + 1 if dim >= 0 else dim)


def of_layer(hf: Any, hidden: Tensor, documents: TokenDocuments | None) -> Tensor:
    """Our arithmetic between the projections of transformers' layer."""
    keys = GROUPS * KEY_WIDTH
    values = GROUPS * PER_GROUP * VALUE_WIDTH
    if isinstance(hf, Qwen3NextGatedDeltaNet):
        projected = by_group([hf.in_proj_qkvz(hidden), hf.in_proj_ba(hidden)], -1)
    else:
        qkv = hf.in_proj_qkv(hidden).split([keys, keys, values], dim=-1)
        projected = by_group([*qkv, hf.in_proj_z(hidden), hf.in_proj_b(hidden), hf.in_proj_a(hidden)], -1)
    convolution = by_group(hf.conv1d.weight[:, 0].split([keys, keys, values]), 0).flatten(0, 1)
    weights = GatedDeltaWeights(convolution, hf.A_log, hf.dt_bias, hf.norm.weight, 1e-5, KEY_WIDTH)
    return hf.out_proj(gated_delta_net(projected, weights, documents))


@pytest.mark.parametrize("per_group", [1, PER_GROUP])
@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
@pytest.mark.parametrize("rule", [torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule])
def test_rule(rule: Any, length: int, per_group: int) -> None:
    inputs = rule_inputs(length, per_group)
    assert_equal([gated_delta_rule(*inputs), hugging_face_rule(rule, inputs)], inputs)


def test_rule_in_documents() -> None:
    inputs = rule_inputs(BOUNDS[-1])
    apart = [
        hugging_face_rule(torch_recurrent_gated_delta_rule, [t[:, start:end] for t in inputs])
        for start, end in pairwise(BOUNDS)
    ]
    assert_equal([gated_delta_rule(*inputs, TOGETHER), torch.cat(apart, dim=1)], inputs)


def test_convolution_in_documents() -> None:
    """Tap by tap: no tap reaches into the document before, though documents are shorter than the taps."""
    torch.manual_seed(3)
    x = torch.randn(2, BOUNDS[-1], 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, TAPS, dtype=torch.float64, requires_grad=True)
    expected = torch.stack(
        [
            sum(
                (x[:, at - back] * weight[:, -1 - back] for back in range(min(TAPS, at - start + 1))),
                start=torch.zeros(2, 5, dtype=torch.float64),
            )
            for start, end in pairwise(BOUNDS)
            for at in range(start, end)
        ],
        dim=1,
    )
    assert_equal([causal_convolution(x, weight, TOGETHER), expected], [x, weight])


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize("kind", LAYERS)
def test_layer(kind: str, packed: bool) -> None:
    hf = layer(kind)
    hidden = torch.randn(2, BOUNDS[-1], 32, dtype=torch.float64, requires_grad=True)
    with Widened():
        bounds = sorted({*BOUNDS}) if packed else [0, BOUNDS[-1]]
        runs = [hidden[:, start:end] for start, end in pairwise(bounds)]
        theirs = torch.cat([hf(run) for run in runs], dim=1)
    ours = of_layer(hf, hidden, TOGETHER if packed else None)
    assert_equal([ours, theirs], [hidden, *hf.parameters()])


@pytest.mark.parametrize("kind", LAYERS)
def test_layer_in_bfloat16(kind: str) -> None:
    """Rounded where transformers rounds: the same bits in nearly every place."""
    hf = layer(kind)
    hidden = torch.randn(2, 2 * CHUNK, 32, dtype=torch.bfloat16)
    try:
        with torch.no_grad():
            theirs = hf.bfloat16()(hidden)
            ours = of_layer(hf, hidden, None)
    finally:
        layer.cache_clear()
    assert (ours != theirs).float().mean() < 0.01


def test_strongest_decay() -> None:
    """Forgetting at once overflows nowhere, though the sum of a chunk's decays is beyond float32's exponents."""
    inputs = [t.detach().float() for t in rule_inputs(2 * CHUNK + 5)]
    inputs[3] = torch.where(torch.rand(inputs[3].shape) < 0.5, -80.0, -1e-3)
    inputs = [t.requires_grad_() for t in inputs]
    outs = [gated_delta_rule(*inputs), hugging_face_rule(torch_recurrent_gated_delta_rule, inputs)]
    for ours, theirs in [outs, *zip(*(torch.autograd.grad(out.square().sum(), inputs) for out in outs), strict=True)]:
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-3, atol=1e-4)
