"""The product out of an expert, for the torch layer spec.

Owns what Megatron-Core's row-parallel layer lacks where experts have biases: with EP 1 and ETP 1 it hands its product
through a reduction over one rank, and autograd then refuses Megatron-Core's own addition of the bias in place.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import RowParallelLinear


class ExpertRowParallelLinear(RowParallelLinear):
    """x W^T [t, h] of this rank's columns, bias handed on; the token dispatcher sums over expert-tensor-parallel
    ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.explicit_expert_comm = True
