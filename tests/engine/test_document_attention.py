"""Attention of documents to themselves and to a shared prefix, against one softmax under a mask in plain torch: each
document by itself, and short ones together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megaswift.engine import document_attention
from megaswift.engine.document_attention import AttentionRule, RowDocuments, attend_documents

BOUNDS = [0, 3, 9, 11, 12, 20, 24, 30, 31]
PREFIXES = [-1, 0, 0, 0, -1, -1, 5, 5]
"""Of each document; the third document's neighbours share one, the fifth has none."""


def rows() -> RowDocuments:
    made = RowDocuments(BOUNDS[-1], torch.tensor(BOUNDS))
    lengths = [end - start for start, end in zip(BOUNDS, BOUNDS[1:], strict=False)]
    made.prefixes = [(p, lengths[p] if p >= 0 else 0) for p in PREFIXES]
    return made


def seen(window: int | None) -> Tensor:
    """bool [queries, keys], written out token by token."""
    found = torch.zeros(BOUNDS[-1], BOUNDS[-1], dtype=torch.bool)
    for number, prefix in enumerate(PREFIXES):
        own = list(range(BOUNDS[number], BOUNDS[number + 1]))
        keys = ([] if prefix < 0 else list(range(BOUNDS[prefix], BOUNDS[prefix + 1]))) + own
        for query in own:
            upto = keys.index(query) + 1
            for key in keys[:upto] if window is None else keys[max(0, upto - window) : upto]:
                found[query, key] = True
    return found


def explicit(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
    """[b, heads, s, d]."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * rule.scale
    scores = scores if rule.softcap is None else rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores.masked_fill(~seen(rule.window), float("-inf"))
    if rule.sink is not None:
        sinks = rule.sink[None, :, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1] @ v
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("joined", [0, 7, 12, 256])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("kind", ["plain", "sink", "softcap", "wide values"])
def test_value_and_gradients(kind: str, window: int | None, joined: int) -> None:
    torch.manual_seed(0)
    width = 6 if kind == "wide values" else 8
    leaves = [torch.randn(2, heads, BOUNDS[-1], d) for heads, d in ((4, 8), (2, 8), (2, width))]
    sink = torch.tensor([-3.0, 0.0, 1.5, 6.0])
    weights, results = torch.randn(2, 4, BOUNDS[-1], width), []
    documents = rows() if kind == "softcap" else rows().join_short(joined)
    for ours in (True, False):
        q, k, v, s = (t.clone().requires_grad_() for t in (*leaves, sink))
        rule = AttentionRule(0.4, window, 0.7 if kind == "softcap" else None, s if kind == "sink" else None)
        out = attend_documents(q, k, v, documents, rule) if ours else explicit(q, k, v, rule)
        (out * weights).sum().backward()
        results.append([out, *(t.grad for t in (q, k, v)), *([s.grad] if kind == "sink" else [])])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=3e-6)


def test_which_documents_are_joined() -> None:
    """Neighbours with the same prefix or none, up to the limit; never a prefix, which others attend to by itself."""
    assert rows().join_short(0).joined == [(3,), (6,), (2,), (1,), (8,), (4,), (6,), (1,)]
    assert rows().join_short(8).joined == [(3,), (6, 2), (1,), (8,), (4,), (6, 1)]
    assert rows().join_short(100).joined == [(3,), (6, 2, 1), (8,), (4,), (6, 1)]
    assert rows().join_short(100).prefixes == [(-1, 0), (0, 3), (-1, 0), (-1, 0), (3, 4)]
    plain = RowDocuments(9, torch.tensor([0, 2, 4, 9])).join_short(4)
    assert plain.joined == [(2, 2), (5,)] and plain.bounds == [0, 4, 9]


def test_layers_share_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made once for a micro-batch, and for each window."""
    made: list[tuple[int, ...]] = []
    copy = document_attention.copy_to_device_async
    monkeypatch.setattr(
        document_attention, "copy_to_device_async", lambda t, device: made.append(t.shape) or copy(t, device)
    )
    documents, qkv = rows().join_short(100), torch.randn(3, 1, 2, BOUNDS[-1], 8)
    for window in (None, 4, None, 4):
        attend_documents(*qkv, documents, AttentionRule(1.0, window))
    assert sorted(made) == [(7, 11), (7, 11), (9, 12), (9, 12)]


@pytest.mark.parametrize(("sinks", "window"), [(0, None), (1, None), (1, 4)])
def test_masks_after_prefixes_are_kept_once(sinks: int, window: int | None) -> None:
    """Of several layers and equally long answers, in what the backward pass keeps: one for each length."""
    documents = RowDocuments(32, torch.tensor([0, 8, 16, 24, 32]))
    documents.prefixes = [(-1, 0), (0, 8), (0, 8), (0, 8)]
    leaves = [torch.randn(1, 2, 32, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        for _ in range(3):
            rule = AttentionRule(8**-0.5, window, None, torch.zeros(2) if sinks else None)
            attend_documents(*leaves, documents, rule)
    masks = [t for t in kept if t.shape[-2:] == (8, sinks + (16 if window is None else 8 + window - 1))]
    assert len(masks) == 9 and len({t.untyped_storage().data_ptr() for t in masks}) == 1


@pytest.mark.parametrize("shape", [(5, 9), (4, 5), (1, 7)])
def test_a_gpu_gets_the_same_mask_by_name(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 8) for n in (shape[0], shape[1], shape[1]))
    mask = RowDocuments(shape[1]).mask(*shape, AttentionRule(1.0), q)
    named = causal_lower_right(*shape)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=named)
    got = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(got, want)
