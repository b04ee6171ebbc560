"""Megatron-Core's own loader fills its own model from a checkpoint, on a CPU.

Nothing of this project is used, so that the same file runs in an environment with another Megatron-Core.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.bridge.foreign.megatron_writer import Job, models, start

Filled = list[tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]]


def loaded(rank: int, world: int, job: Job) -> Filled:
    """Of each chunk: the parameters that Megatron-Core's loader gives a model of zeros, those that the weights of the
    folder give it by another way, and what else the checkpoint says."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.validation import StrictHandling

    start(rank, world, job)
    found = []
    for chunk in models(job):
        want = {name: p.detach().clone() for name, p in chunk.named_parameters()}
        for parameter in chunk.parameters():
            parameter.data.zero_()
        metadata = {**dict(job.metadata), "dp_cp_group": parallel_state.get_data_parallel_group(True)}
        wanted = {"model": chunk.sharded_state_dict(metadata=metadata)}
        state, unasked, absent = dist_checkpointing.load(wanted, job.target, strict=StrictHandling.RETURN_ALL)
        assert not unasked and all("._extra_state" in key for key in absent), (unasked, absent)
        chunk.load_state_dict(state["model"], strict=False)
        got = {name: p.detach().clone() for name, p in chunk.named_parameters()}
        found.append((got, want, {name: state[name] for name in ("checkpoint_version", "iteration")}))
    dist.barrier()
    dist.destroy_process_group()
    return found


def compare(found: Filled, padding: int) -> None:
    """Hold what was loaded to what was wanted, padding rows aside."""
    for got, want, facts in found:
        assert facts == {"checkpoint_version": 3.0, "iteration": 0}
        for name, tensor in want.items():
            rows: Any = slice(None)
            if padding and name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                rows = (tensor != 9.0).any(1)
            assert torch.equal(got[name][rows], tensor[rows]), name


def run(rank: int, world: int, job: Job) -> None:
    """Load and compare. Collective."""
    compare(loaded(rank, world, job), job.padding)
