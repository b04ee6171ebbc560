"""Packed and windowed attention of the torch spec against one explicit mask in plain torch."""

from types import SimpleNamespace

import pytest
import torch

from megaswift.engine.megatron.attention import RowLayout, TorchAttention


def masked(q, k, v, bounds, window):
    """Softmax attention of [s, heads, d] with the mask written out: same document, not later, within the window."""
    s = q.shape[0]
    document = torch.zeros(s, dtype=torch.long)
    for i, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False)):
        document[a:b] = i
    at = torch.arange(s)
    allowed = (document[:, None] == document[None]) & (at[None] <= at[:, None])
    if window:
        allowed &= at[None] > at[:, None] - window
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("bounds", [[0, 24], [0, 5, 6, 24]])
def test_documents_and_windows(bounds, window):
    torch.manual_seed(0)
    q, k, v = torch.randn(24, 4, 8), torch.randn(24, 2, 8), torch.randn(24, 2, 8)
    config = SimpleNamespace(kv_channels=8, attention_dropout=0.0, window_size=None if window is None else (window - 1, 0))
    module = TorchAttention(config, 1, pg_collection=SimpleNamespace(cp=None))
    rows = RowLayout(24, torch.tensor(bounds), 1, 0)
    got = module(q[:, None], k[:, None], v[:, None], packed_seq_params=rows)
    torch.testing.assert_close(got.view(24, 4, 8), masked(q, k, v, bounds, window), rtol=1e-5, atol=1e-6)


def test_windows_may_skip_layers():
    config = SimpleNamespace(kv_channels=8, attention_dropout=0.0, window_size=(2, 0), window_attn_skip_freq=[1, 0])
    groups = SimpleNamespace(cp=None)
    assert TorchAttention(config, 1, pg_collection=groups).window == 3
    assert TorchAttention(config, 2, pg_collection=groups).window is None
