"""Faults of single ranks: a collective that is left out, another order, another shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megaswift.engine.megatron import forward_backward
from megaswift.engine.vocabulary_shard import VocabularyHeadShardSpec

FAULTY = 1


def skip() -> None:
    """The faulty rank leaves out the second reduction of the vocabulary's head."""
    reduce = VocabularyHeadShardSpec.reduce

    def faulty(self: Any, x: Any, *rest: Any) -> Any:
        if dist.get_rank() == FAULTY and not rest:
            return x
        return reduce(self, x, *rest)

    VocabularyHeadShardSpec.reduce = faulty  # type: ignore[method-assign]


def shape() -> None:
    """The faulty rank reduces a row more."""
    _at_the_end(lambda groups, device: dist.all_reduce(torch.ones(4 + (dist.get_rank() == FAULTY), device=device)))


def order() -> None:
    """The faulty rank reduces over all ranks first, the others over their tensor-parallel group."""

    def faulty(groups: Any, device: torch.device) -> None:
        x = torch.ones(4, device=device)
        if dist.get_rank() == FAULTY:
            dist.all_reduce(x)
            dist.all_reduce(x, group=groups.tp)
        else:
            dist.all_reduce(x, group=groups.tp)
            dist.all_reduce(x)

    _at_the_end(faulty)


def exchanged() -> None:
    """The faulty rank calls two reductions of one shape in the other order."""

    def faulty(groups: Any, device: torch.device) -> None:
        x = torch.ones(4, device=device)
        if dist.get_rank() == FAULTY:
            dist.all_reduce(x + 1, group=groups.tp)
        dist.all_reduce(x, group=groups.tp)
        if dist.get_rank() != FAULTY:
            dist.all_reduce(x + 1, group=groups.tp)

    _at_the_end(faulty)


def _at_the_end(more: Callable[[Any, torch.device], object]) -> None:
    """Behind the passes of a step."""
    schedule = forward_backward.run_forward_backward_schedule

    def run(chunks: Any, microbatches: Any, callback: Any, context: Any, settings: Any) -> None:
        schedule(chunks, microbatches, callback, context, settings)
        more(context.groups, context.device)

    forward_backward.run_forward_backward_schedule = run
