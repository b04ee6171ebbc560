"""NEFTune's noise: how large, and where."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from megaswift.engine.torch.engine import NeftuneNoise, document_length_per_token
from tests.parity.cases import documents, packed, rows

ALPHA = 5.0


def test_a_document_has_one_length_alone_or_packed() -> None:
    docs = documents(1, 2)[0]
    apart, together = rows(docs), packed(docs, 4, 64)
    assert document_length_per_token(apart).tolist() == [
        [len(d.ids)] * len(d.ids) + [0] * (32 - len(d.ids)) for d in docs
    ]
    flat = [document_length_per_token(apart)[i, : -(-len(d.ids) // 4) * 4].tolist() for i, d in enumerate(docs)]
    assert document_length_per_token(together)[0].tolist() == [n for row in flat for n in row] + [0] * (
        64 - sum(map(len, flat))
    )


def test_full_rows_get_transformers_own_noise() -> None:
    """The same numbers from the same seed as its hook."""
    from transformers.integrations.neftune import neftune_post_forward_hook

    ids, ours, theirs = torch.arange(24).view(2, 12), nn.Embedding(24, 16), nn.Embedding(24, 16)
    theirs.load_state_dict(ours.state_dict())
    noise = NeftuneNoise(ours, ALPHA)
    noise.scale = torch.full((2, 12), ALPHA / 12**0.5)
    theirs.neftune_noise_alpha = ALPHA  # type: ignore[assignment]
    theirs.register_forward_hook(neftune_post_forward_hook)
    made = []
    for module in (ours, theirs):
        torch.manual_seed(4)
        made.append(module(ids))
    torch.testing.assert_close(made[0], made[1], rtol=0, atol=1e-6)
    assert float((made[0] - ours.eval()(ids)).abs().max()) > 0.1
    assert torch.equal(ours(ids), theirs.eval()(ids)), "evaluation has noise"


def test_it_is_uniform_in_the_bounds_of_each_document() -> None:
    docs = documents(1, 2)[0]
    batch = rows(docs)
    embedding = nn.Embedding(200, 512)
    noise = NeftuneNoise(embedding, ALPHA)
    noise.scale = noise.of(batch)
    drawn = embedding(batch.input_ids) - nn.functional.embedding(batch.input_ids, embedding.weight)
    for i, d in enumerate(docs):
        bound = ALPHA / math.sqrt(len(d.ids) * 512)
        own = drawn[i, : len(d.ids)]
        assert 0.98 * bound < float(own.abs().max()) <= bound * 1.0001
        assert abs(float(own.mean())) < 0.05 * bound and float(own.var()) == pytest.approx(bound**2 / 3, rel=0.1)
        assert not drawn[i, len(d.ids) :].any(), "padding has noise"
