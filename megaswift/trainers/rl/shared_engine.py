"""One rank leads the conversations of an engine that several ranks share; the others make the same calls of it."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from megaswift import distributed
from megaswift.rollout.sampler import Completion, Sampler, SamplingParams

T = TypeVar("T")


class EngineRanks:
    """The consecutive ranks of one engine, seen from one of them."""

    def __init__(self, ranks: int, timeout_s: float) -> None:
        """Make the group of each engine's ranks. Collective over all ranks."""
        timeout = datetime.timedelta(seconds=timeout_s)
        self.group: Any = dist.new_subgroups(ranks, backend="gloo", timeout=timeout)[0]

    def lead(self, sampler: Sampler, work: Callable[[Any], list[T]]) -> list[T]:
        """Do `work` on the first rank of the engine. Collective over the ranks of the engine.

        Args:
            sampler: This rank's part of the engine.
            work: Gets a sampler whose `generate` all ranks of the engine call with the same arguments.

        Returns:
            What `work` returns; nothing on the other ranks.
        """
        if dist.get_rank(self.group) == 0:
            leading = _LeadingSampler(sampler, self.group)
            try:
                return work(leading)
            finally:
                if not leading.calling:
                    distributed.broadcast_object(None, group=self.group)
        while (call := distributed.broadcast_object(None, group=self.group)) is not None:
            sampler.generate(*call)
        return []


class _LeadingSampler:
    """Tells the other ranks of an engine what it is asked for."""

    def __init__(self, sampler: Sampler, group: Any) -> None:
        self.sampler = sampler
        self.group = group
        self.calling = False
        """Whether a call is under way, or has failed: then it has failed on the other ranks too."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        """`Sampler.generate` on all ranks of the engine."""
        self.calling = True
        distributed.broadcast_object((prompts, sampling, seeds), group=self.group)
        completions = self.sampler.generate(prompts, sampling, seeds)
        self.calling = False
        return completions
