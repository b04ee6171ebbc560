"""Scaled embeddings in bfloat16, bit for bit as Hugging Face's modules scale them: Gemma rounds the factor, Granite the
product only."""

from __future__ import annotations

import math

import pytest
import torch

from megaswift.engine.megatron.model import embedding_scale_hook
from megaswift.models.spec import ArchitectureExtras


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gemma_rounds_the_factor(dtype: torch.dtype) -> None:
    from transformers.models.gemma2.modeling_gemma2 import Gemma2TextScaledWordEmbedding

    factor = math.sqrt(3072)  # 55.43, 55.5 in bfloat16
    theirs = Gemma2TextScaledWordEmbedding(50, 16, 0, embed_scale=factor)
    theirs.weight = torch.nn.Parameter(torch.randn(50, 16).to(dtype))
    ours = torch.nn.Embedding(50, 16, _weight=theirs.weight.detach().clone())
    ours.register_forward_hook(
        embedding_scale_hook(ArchitectureExtras(embedding_scale=factor, embedding_scale_rounded=True))
    )
    assert torch.equal(ours(torch.arange(50)), theirs(torch.arange(50)))


def test_granite_does_not() -> None:
    ours = torch.nn.Embedding(50, 16).to(torch.bfloat16)
    plain = ours(torch.arange(50))
    ours.register_forward_hook(embedding_scale_hook(ArchitectureExtras(embedding_scale=12.3)))
    assert torch.equal(ours(torch.arange(50)), plain * 12.3)
    assert not torch.equal(plain * 12.3, plain * torch.tensor(12.3, dtype=torch.bfloat16))
