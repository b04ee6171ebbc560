"""Megatron-Core's vocabulary-parallel embedding without waits of the host for the device.

Megatron-Core's masks tokens of other ranks by boolean indices, whose count the host reads from the device: three waits
a micro-batch, the backward pass included.
"""

from __future__ import annotations

import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from torch import Tensor


class UnsyncedVocabParallelEmbedding(VocabParallelEmbedding):
    """The same numbers from `masked_fill`."""

    def forward(self, input_: Tensor) -> Tensor:
        """Token ids [b, s] to vectors [b, s, h], or this rank's part of [s, b, h] with sequence parallelism."""
        if self.tp_group.size() == 1:
            return super().forward(input_)
        elsewhere = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
        rows = (input_ - self.vocab_start_index).masked_fill_(elsewhere, 0)
        vectors = self.weight[rows] if self.deterministic_mode else F.embedding(rows, self.weight)
        vectors = vectors.masked_fill_(elsewhere.unsqueeze(-1), 0.0)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(vectors.transpose(0, 1).contiguous(), group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(vectors, group=self.tp_group)
