"""Attention sinks against the softmax written out in plain torch: value, gradients, documents, windows, shared key
heads."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megaswift.engine.document_attention import RowDocuments
from megaswift.engine.megatron.layers.attention.document import RowPackedSeqParams, TorchAttention
from megaswift.models.spec import ArchitectureExtras
from tests.engine.masks import seen


def explicit(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, bounds: list[int], window: int | None) -> Tensor:
    """[s, heads, d]: each head's softmax over the scores seen and its sink, the sink's share thrown away."""
    s = q.shape[0]
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = (torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5).masked_fill(
        ~seen(s, bounds, window), float("-inf")
    )
    both = torch.cat([scores, sink[:, None, None].expand(-1, s, 1)], dim=-1)
    return torch.einsum("hqk,khd->qhd", both.softmax(-1)[..., :-1], v)


@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("bounds", [[0, 24], [0, 5, 6, 24]])
def test_sinks(bounds: list[int], window: int | None) -> None:
    torch.manual_seed(0)
    q, k, v, sink = (
        torch.randn(24, 4, 8),
        torch.randn(24, 2, 8),
        torch.randn(24, 2, 8),
        torch.tensor([-3.0, 0.0, 1.5, 6.0]),
    )
    config = SimpleNamespace(
        kv_channels=8,
        attention_dropout=0.0,
        window_size=None if window is None else (window - 1, 0),
        softmax_type="learnable",
        num_attention_heads=4,
        tensor_model_parallel_size=1,
        params_dtype=torch.float32,
        features=ArchitectureExtras(),
    )
    module = TorchAttention(config, 1, pg_collection=SimpleNamespace(cp=None))
    weights, results = torch.randn(24, 4, 8), []
    for ours in (True, False):
        leaves = [t.clone().requires_grad_() for t in (q, k, v, sink)]
        if ours:
            module.softmax_offset = torch.nn.Parameter(sink.clone())
            rows = RowPackedSeqParams(RowDocuments(24, torch.tensor(bounds)))
            out = module(*(t[:, None] for t in leaves[:3]), packed_seq_params=rows).reshape(24, 4, 8)
            leaves[3] = module.softmax_offset
        else:
            out = explicit(*leaves, bounds, window)
        (out * weights).sum().backward()
        results.append([out, *(t.grad for t in leaves)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)
