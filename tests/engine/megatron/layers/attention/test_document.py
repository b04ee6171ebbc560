"""Packed and windowed attention of the torch spec against one explicit mask in plain torch."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.bias import CausalVariant
from torch.utils._python_dispatch import TorchDispatchMode

from megaswift.engine import document_attention
from megaswift.engine import document_attention as engine_document_attention
from megaswift.engine.document_attention import AttentionRule, RowDocuments
from megaswift.engine.megatron.layers.attention.document import RowPackedSeqParams, TorchAttention
from megaswift.models.spec import ArchitectureExtras
from tests.engine.masks import seen

UNUSED = (torch.empty(0), torch.empty(0))
"""Index and order of slices, where a test gathers them its own way."""


def masked(q, k, v, bounds, window, change=lambda scores: scores):
    """Softmax attention of [s, heads, d] with the mask written out: same document, not later, within the window."""
    allowed = seen(q.shape[0], bounds, window)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    scores = change(scores)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize("block", [2, 1024])
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("bounds", [[0, 24], [0, 5, 6, 24]])
def test_documents_and_windows(monkeypatch, bounds, window, block):
    """Also where windowed queries go in blocks: then no mask is as large as the document."""
    monkeypatch.setattr(document_attention, "BLOCK", block)
    torch.manual_seed(0)
    q, k, v = torch.randn(24, 4, 8), torch.randn(24, 2, 8), torch.randn(24, 2, 8)
    config = SimpleNamespace(
        kv_channels=8,
        attention_dropout=0.0,
        softmax_type="vanilla",
        window_size=None if window is None else (window - 1, 0),
        features=ArchitectureExtras(),
    )
    module = TorchAttention(config, 1, pg_collection=SimpleNamespace(cp=None))
    rows = RowPackedSeqParams(RowDocuments(24, torch.tensor(bounds)))
    got = module(q[:, None], k[:, None], v[:, None], packed_seq_params=rows)
    torch.testing.assert_close(got.view(24, 4, 8), masked(q, k, v, bounds, window), rtol=1e-5, atol=1e-6)
    made = {id(mask): mask.numel() for mask in rows.documents._masks.values() if mask is not None}
    if block == 2 and window == 3:
        assert max(made.values()) <= max(6 * 6, 3 * 5) and len(made) <= 6


def test_layers_share_masks():
    """One mask a micro-batch: a second call makes none."""
    config = SimpleNamespace(
        kv_channels=8, attention_dropout=0.0, softmax_type="vanilla", window_size=(2, 0), features=ArchitectureExtras()
    )
    rows = RowPackedSeqParams(RowDocuments(24, torch.tensor([0, 5, 24])))
    q, k, v = torch.randn(24, 1, 4, 8), torch.randn(24, 1, 2, 8), torch.randn(24, 1, 2, 8)
    made = []
    for layer in (1, 2):
        TorchAttention(config, layer, pg_collection=SimpleNamespace(cp=None))(q, k, v, packed_seq_params=rows)
        made.append({key: id(mask) for key, mask in rows.documents._masks.items()})
    assert made[0] == made[1]


@pytest.mark.parametrize("sink", [None, torch.zeros(4)])
def test_a_gpu_gets_no_mask_without_a_window(sink):
    """Under context parallelism it would be as large as queries x keys; elsewhere it is one for all layers."""
    rows, rule, keys = RowDocuments(24, None, 2, 1), AttentionRule(1.0, None, None, sink), 12 + (sink is not None)
    named = rows.mask(6, 12, rule, SimpleNamespace(device=SimpleNamespace(type="cuda"), dtype=torch.float32))
    assert (named.variant, named.seq_len_q, named.seq_len_kv) == (CausalVariant.LOWER_RIGHT, 6, keys)
    assert not rows._masks
    made = rows.mask(6, 12, rule, torch.zeros(1))
    assert made.shape == (6, keys) and rows.mask(6, 12, rule, torch.zeros(1)) is made


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_blocks_under_context_parallelism(monkeypatch, rank, sinks):
    """Runs of queries that begin inside a document: value and gradients as in one block."""
    torch.manual_seed(1)
    config = SimpleNamespace(
        kv_channels=8,
        attention_dropout=0.0,
        softmax_type="learnable" if sinks else "vanilla",
        num_attention_heads=4,
        tensor_model_parallel_size=1,
        params_dtype=torch.float32,
        window_size=(4, 0),
        features=ArchitectureExtras(),
    )
    module = TorchAttention(config, 1, pg_collection=SimpleNamespace(cp=None))
    whole = torch.randn(64, 1, 2, 16)
    monkeypatch.setattr(
        "megaswift.engine.megatron.layers.attention.document.gather_key_value_sequence", lambda *_: whole_leaf
    )
    query = torch.randn(32, 1, 4, 8)
    results = []
    for block in (2, 1024):
        monkeypatch.setattr(document_attention, "BLOCK", block)
        leaf, whole_leaf = query.clone().requires_grad_(), whole.clone().requires_grad_()
        keys = torch.zeros(32, 1, 2, 8)
        rows = RowPackedSeqParams(RowDocuments(64, torch.tensor([0, 48, 64]), 2, rank), *UNUSED)
        out = module(leaf, keys, keys, packed_seq_params=rows)
        out.square().sum().backward()
        results.append((out, leaf.grad, whole_leaf.grad))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)


def test_windows_may_skip_layers():
    config = SimpleNamespace(
        kv_channels=8,
        attention_dropout=0.0,
        softmax_type="vanilla",
        window_size=(2, 0),
        window_attn_skip_freq=[1, 0],
        features=ArchitectureExtras(),
    )
    groups = SimpleNamespace(cp=None)
    assert TorchAttention(config, 1, pg_collection=groups).window == 3
    assert TorchAttention(config, 2, pg_collection=groups).window is None


@pytest.mark.parametrize("bytes_kept", [1 << 26, 4 * 4 * 19 * 5])
@pytest.mark.parametrize("window", [None, 3])
def test_soft_cap(monkeypatch, window, bytes_kept):
    """Value and gradients of scores under a cap that bites, in one chunk of queries and in chunks of a few."""
    monkeypatch.setattr(engine_document_attention, "CHUNK_BYTES", bytes_kept)
    torch.manual_seed(0)
    q, k, v = torch.randn(24, 4, 8), torch.randn(24, 2, 8), torch.randn(24, 2, 8)
    config = SimpleNamespace(
        kv_channels=8,
        attention_dropout=0.0,
        softmax_type="vanilla",
        window_size=None if window is None else (window - 1, 0),
        features=ArchitectureExtras(attention_softcap=0.7),
    )
    module = TorchAttention(config, 1, softmax_scale=0.5, pg_collection=SimpleNamespace(cp=None))
    weights = torch.randn(24, 4, 8)
    results = []
    for compute in (
        lambda q, k, v: module(
            q[:, None],
            k[:, None],
            v[:, None],
            packed_seq_params=RowPackedSeqParams(RowDocuments(24, torch.tensor([0, 5, 24]))),
        ),
        lambda q, k, v: masked(q, k, v, [0, 5, 24], window, lambda s: 0.7 * torch.tanh(s * 8**0.5 * 0.5 / 0.7)),
    ):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = compute(*leaves).reshape(24, 4, 8)
        (out * weights).sum().backward()
        results.append([out, *(t.grad for t in leaves)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)


class Written(TorchDispatchMode):
    """Counts the elements that operations give."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if not function.is_view:
            self.elements += sum(
                t.numel() for t in (out if isinstance(out, tuple | list) else (out,)) if isinstance(t, torch.Tensor)
            )
        return out


@pytest.mark.parametrize("ranks", [1, 2])
def test_many_documents_cost_what_few_do(monkeypatch, ranks):
    """Gradients of a row are put together once: work that grows with row x documents took a third of a step of 128
    short completions."""
    monkeypatch.setattr(
        "megaswift.engine.megatron.layers.attention.document.gather_key_value_sequence", lambda x, *_: torch.cat([x, x])
    )
    config = SimpleNamespace(
        kv_channels=8, attention_dropout=0.0, softmax_type="vanilla", window_size=None, features=ArchitectureExtras()
    )
    module = TorchAttention(config, 1, pg_collection=SimpleNamespace(cp=None))
    written = []
    for documents in (2, 64):
        bounds = torch.arange(documents + 1) * (1024 // documents)
        leaves = [torch.randn(1024 // ranks, 1, 2, 8, requires_grad=True) for _ in range(3)]
        with Written() as counted:
            rows = RowPackedSeqParams(RowDocuments(1024, bounds, ranks), *(UNUSED if ranks > 1 else ()))
            module(*leaves, packed_seq_params=rows).sum().backward()
        written.append(counted.elements)
    assert written[1] < 1.5 * written[0]
