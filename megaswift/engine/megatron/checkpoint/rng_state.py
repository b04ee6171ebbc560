"""Random states of a rank with those of Megatron's tracker.

Megatron's own checkpoints keep one expert state for all expert-parallel ranks (Megatron-LM pull request 6858); here
each rank has its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core import tensor_parallel
from torch import Tensor

from megaswift.engine import rng_state
from megaswift.engine.megatron.parallel_context import ParallelContext


def write_rank_rng(directory: Path, rank: int) -> Path:
    """This rank's states; returns the file, not yet flushed."""
    return rng_state.write_rng_state(directory, rank, tensor_parallel.get_cuda_rng_tracker().get_states())


def fits_rank_rng(tensors: dict[str, Tensor]) -> bool:
    """Whether these are states of the generators that this rank has."""
    return rng_state.fits_generators(tensors, tensor_parallel.get_cuda_rng_tracker().get_states())


def restore_rank_rng(tensors: dict[str, Tensor], plain: dict[str, Any]) -> None:
    """Every generator of this rank back to where it stood."""
    tensor_parallel.get_cuda_rng_tracker().set_states(rng_state.restore_rng_state(tensors, plain))


def reseed_ranks(context: ParallelContext, directory: Path) -> int:
    """Fresh states on every rank, from the saved ones of rank 0. Returns the seed."""
    seed = rng_state.fresh_seed(directory)
    context.seed(seed)
    return seed
