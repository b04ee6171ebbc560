"""NEFTune (arXiv:2310.05914): uniform noise on the embeddings of training batches, of +-alpha / sqrt(L d).

L is the number of tokens of the document, padding left out, as in the authors' code: a document gets the same noise
alone, padded in a batch, or packed with others. transformers' hook takes the row's length instead, padding and
neighbours included; on a full row of one document the two agree. Numbers are drawn from the rank's own random state,
which checkpoints hold.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megaswift.losses.contract import Batch


def document_lengths(batch: Batch) -> Tensor:
    """int64 [b, s]: the number of tokens in each token's document; 0 on padding."""
    valid = batch.valid.long()
    if batch.cu_seqlens is None:
        return valid * valid.sum(1, keepdim=True)
    ends = batch.cu_seqlens[1:].long().to(valid.device)
    document = torch.bucketize(torch.arange(valid.shape[1], device=valid.device), ends, right=True)  # [s]
    sizes = valid.new_zeros(len(ends)).index_add_(0, document, valid[0])
    return valid * sizes[document]


class NeftuneNoise:
    """A hook on the embedding. `scale` [b, s] holds alpha / sqrt(L) of the batch that comes, None where there is to be
    no noise."""

    def __init__(self, embedding: nn.Module, alpha: float) -> None:
        self.alpha = alpha
        self.scale: Tensor | None = None
        self.handle = embedding.register_forward_hook(self)

    def of(self, batch: Batch) -> Tensor:
        """Its scale: 0 on padding."""
        tokens = document_lengths(batch)
        return self.alpha * (tokens > 0) * tokens.clamp(min=1).rsqrt()

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        """Embeddings [b, s, d] with noise."""
        if self.scale is None or not module.training:
            return None
        noise = torch.empty_like(output, dtype=torch.float32).uniform_(-1.0, 1.0)
        return output + (noise * (self.scale / output.shape[-1] ** 0.5)[..., None]).to(output.dtype)
