"""Sums over documents, packed and padded, against plain slices."""

from __future__ import annotations

import pytest
import torch

from megaswift.losses.contract import Batch
from megaswift.losses.document_segments import (
    document_count,
    document_index,
    document_sums,
    masked_token_number_in_document,
    masked_tokens_per_document,
    token_mask_of_documents,
)
from tests.losses.bigram import batch, documents

DOCS = documents([(3, 5), (1, 1), (6, 2), (2, 7)])


def slices(b: Batch) -> list[tuple[int, slice]]:
    if b.cu_seqlens is None:
        return [(i, slice(None)) for i in range(len(DOCS))]
    return [(0, slice(int(a), int(z))) for a, z in zip(b.cu_seqlens[:-1], b.cu_seqlens[1:], strict=True)]


@pytest.mark.parametrize("packed", [False, True])
def test_against_slices(packed: bool) -> None:
    b = batch(DOCS, packed)
    at = slices(b)
    x = torch.randn(b.input_ids.shape, dtype=torch.float64, requires_grad=True)
    assert document_count(b) == 4
    for i, place in enumerate(at):
        assert (document_index(b)[place] == i).all()
    sums = document_sums(b, x)
    assert torch.allclose(sums, torch.stack([x[p].sum() for p in at]))
    weights = torch.arange(1.0, 5, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((sums * weights).sum(), [x])
    assert all((gradient[p] == weights[i]).all() for i, p in enumerate(at))
    mask = b.loss_weights != 0
    assert masked_tokens_per_document(b, mask).tolist() == [5, 1, 2, 7]
    for p, n in zip(at, (5, 1, 2, 7), strict=True):
        assert masked_token_number_in_document(b, mask)[p][mask[p]].tolist() == list(range(1, n + 1))
    member = token_mask_of_documents(b, torch.tensor([3, 1]))
    assert [bool(member[p].all()) and bool(member[p].any()) for p in at] == [False, True, False, True]
    member = token_mask_of_documents(b, torch.tensor([3, 1, 0]), torch.tensor([False, True, False]))
    assert [bool(member[p].all()) and bool(member[p].any()) for p in at] == [False, True, False, False]
    assert not member[at[0]].any() and not token_mask_of_documents(b, torch.tensor([], dtype=torch.int64)).any()


def test_long_sums_keep_their_small_differences() -> None:
    """A float32 running sum of 2^20 terms near 1 is off by far more than one rounding."""
    length = 2**20
    x = torch.rand(1, length, generator=torch.Generator().manual_seed(0))
    ids = torch.zeros(1, length, dtype=torch.int64)
    b = Batch(ids, ids, x, ids, x > 0, torch.tensor([0, length], dtype=torch.int32))
    assert document_sums(b, x).dtype == torch.float32
    assert document_sums(b, x).item() == pytest.approx(x.double().sum().item(), rel=1e-7)


def test_a_filler_is_a_document_without_weight() -> None:
    for packed in (False, True):
        b = batch([], packed)
        assert document_count(b) == 1 and masked_tokens_per_document(b, b.loss_weights != 0).tolist() == [0]
