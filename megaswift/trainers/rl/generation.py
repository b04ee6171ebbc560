"""Generates the completions of a generation over data-parallel ranks; every rank gets the complete list.

Owns who samples what and when the sampler gets the engine's weights. A completion draws from a seed of its own, made of
the run's seed, the generation and its number, so that the layout of the ranks leaves no trace in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from megaswift import distributed
from megaswift.data.prompts.images import PromptImageReader
from megaswift.data.prompts.source import Prompt
from megaswift.engine.protocol import Engine, Receivers
from megaswift.parallel.layout import Coordinates, Layout
from megaswift.rollout.sampler import (
    BatchImages,
    Completion,
    ImageSampler,
    InterruptibleSampler,
    RestartedSampler,
    Sampler,
    SamplingParams,
)
from megaswift.rollout.sync_folders import SyncRounds
from megaswift.trainers.rl.multi_turn import MultiTurnRunner
from megaswift.trainers.rl.shared_engine import EngineRanks


def is_sampling_rank(coordinates: Coordinates) -> bool:
    """Return whether this rank is the first of its data-parallel replica, which has a sampler."""
    return coordinates.tp == coordinates.pp == coordinates.cp == 0


def completion_seeds(seed: int, generation: int, count: int) -> list[int]:
    """Return a seed below 2^63 for each completion."""
    return [
        int(np.random.SeedSequence([seed, generation, i]).generate_state(1, np.uint64)[0] >> 1) for i in range(count)
    ]


@dataclass
class CompletionGenerator:
    """The samplers of a run, seen from one rank."""

    engine: Engine
    coordinates: Coordinates
    sampler: Sampler | None
    """None on ranks without one."""
    sampling: SamplingParams
    seed: int
    multi_turn: MultiTurnRunner | None = None
    """Leads the conversations of a run whose completions an environment answers."""
    adapters: SyncRounds | None = None
    """The folders by which adapters are sent alone; None: all weights are sent."""
    base: str = ""
    """The name of the model that the adapters belong to."""
    receivers: Receivers = "replicas"
    """The ranks that give weights to their samplers: `all` if every rank has a sampler, `replicas` if the first one of
    each data-parallel replica has one, `rank0` if their samplers are the same servers."""
    ranks_per_engine: int = 1
    """Consecutive ranks whose samplers are one engine: they are given the same prompts, and each gets the
    completions. More than 1 only if every rank has a sampler."""
    engine_ranks: EngineRanks | None = None
    """These ranks, where one of them leads the conversations of `multi_turn`; None: each rank has its own engine."""
    images: PromptImageReader | None = None
    """For a vision-language model: reads the prompts' images."""

    @property
    def layout(self) -> Layout:
        """The layout of the training ranks."""
        return self.engine.layout

    def sampled_completions(self, count: int) -> range:
        """Return which of `count` completions this rank's sampler writes; the same on all ranks of one engine."""
        if self.sampler is None:
            return range(0)
        if self.receivers != "all":
            return _share(count, self.coordinates.dp, self.layout.dp)
        ranks = self.ranks_per_engine
        return _share(count, distributed.global_rank() // ranks, self.layout.world_size // ranks)

    def scored_completions(self, count: int, group: int = 1) -> range:
        """Return which of `count` completions this rank scores, in whole groups; different on every rank."""
        if self.sampler is None:
            return range(0)
        if self.receivers == "all":
            return _share(count, distributed.global_rank(), self.layout.world_size, group)
        return _share(count, self.coordinates.dp, self.layout.dp, group)

    @property
    def speaks_for_replica(self) -> bool:
        """Whether this rank speaks for its data-parallel replica."""
        return is_sampling_rank(self.coordinates)

    @property
    def sends_weights(self) -> bool:
        """Whether this rank sends weights to its sampler."""
        return self.sampler is not None and (self.receivers != "rank0" or distributed.global_rank() == 0)

    def synchronize(self) -> None:
        """Send the engine's weights to the samplers: all weights, or the adapters alone. Collective."""
        if self.adapters is not None:
            self.send_adapters(self.adapters)
            return
        weights = self.engine.hf_weights(to=self.receivers, on_device=True)

        def pass_on() -> None:
            try:
                if self.sampler is not None and self.sends_weights:
                    self.sampler.update_weights(weights)
            finally:
                # The stream is collective: ranks without a sampler read it too, and so does a rank whose sampler
                # stopped early or failed.
                for _ in weights:
                    pass

        # Servers have loaded the weights before another rank asks them for completions.
        distributed.run_and_gather_on_all_ranks(pass_on)

    def send_adapters(self, rounds: SyncRounds) -> None:
        """Write the adapters on rank 0 for every sampler to read; samplers may come back to the folder until the next
        is there. Collective."""
        folder = distributed.run_on_rank0(rounds.begin)
        distributed.run_and_gather_on_all_ranks(lambda: self.engine.write_adapter(folder, self.base))
        distributed.run_and_gather_on_all_ranks(
            lambda: self.sampler.update_adapter(folder) if self.sampler is not None and self.sends_weights else None
        )
        if distributed.global_rank() == 0:
            rounds.taken(folder)

    def engine_restarts(self) -> int | None:
        """Return how often engines of the sampler were started again; None where nothing counts it."""
        return self.sampler.restarts() if isinstance(self.sampler, RestartedSampler) else None

    def close(self) -> None:
        """Free the samplers' memory and remove their files. Not collective."""
        if self.sampler is not None:
            self.sampler.close()
        if self.adapters is not None:
            self.adapters.close()  # only rank 0 has written folders

    def write(self, prompts: Sequence[Prompt], generation: int, greedy_every: int = 0) -> list[Completion]:
        """Write one completion for each prompt, and return all of them on every rank. Every `greedy_every`-th is
        greedy; 0: none. Collective."""
        return self.gather(lambda: self.write_share(prompts, generation, greedy_every))

    def write_share(
        self,
        prompts: Sequence[Prompt],
        generation: int,
        greedy_every: int = 0,
        begun: Sequence[Completion] = (),
        stop: Callable[[], bool] | None = None,
    ) -> list[Completion]:
        """Write this rank's completions. Not collective.

        Args:
            prompts: Of all ranks.
            generation: Makes the seeds, with the number of a completion.
            greedy_every: Every so many-th completion is greedy; 0: none.
            begun: What an earlier call has written of this rank's completions; empty: nothing.
            stop: Once it is true, unfinished completions are returned as they are; None: all are finished.
        """
        mine = self.sampled_completions(len(prompts))
        drawn = completion_seeds(self.seed, generation, len(prompts))
        if self.sampler is None or not mine:
            return []
        completions = dict(zip(mine, begun or [Completion((), (), False)] * len(mine), strict=True))
        unfinished = [i for i in mine if not self.is_complete(completions[i])]
        greedy = [i for i in unfinished if greedy_every and (i + 1) % greedy_every == 0]
        if self.multi_turn is not None:
            # All conversations at a time: none waits for those that are drawn otherwise.
            asked = [prompts[i] for i in unfinished]
            row_seeds = [drawn[i] for i in unfinished]
            places = {place for place, i in enumerate(unfinished) if i in greedy}
            work = partial(self.multi_turn.write, sampling=self.sampling, prompts=asked, seeds=row_seeds, greedy=places)
            if self.engine_ranks is not None:
                return self.engine_ranks.lead(self.sampler, work)
            return work(self.sampler)
        sampled = sorted({*unfinished} - {*greedy})
        for rows, sampling in ((sampled, self.sampling), (greedy, replace(self.sampling, temperature=0.0))):
            if rows:
                asked = [prompts[i] for i in rows]
                row_seeds = [drawn[i] for i in rows]
                if stop is None:
                    drafts = self.complete(self.sampler, asked, sampling, row_seeds)
                else:
                    assert isinstance(self.sampler, InterruptibleSampler), "rules let only these backends through"
                    tokens = [prompt.token_ids for prompt in asked]
                    some = [completions[i] for i in rows]
                    drafts = self.sampler.extend(tokens, some, sampling, row_seeds, stop)
                completions |= dict(zip(rows, drafts, strict=True))
        return [completions[i] for i in mine]

    def is_complete(self, completion: Completion) -> bool:
        """Return whether a completion has ended, at a stop token or at the largest length."""
        return completion.finished or len(completion.token_ids) >= self.sampling.max_tokens

    def complete(
        self, sampler: Sampler, prompts: Sequence[Prompt], sampling: SamplingParams, row_seeds: Sequence[int]
    ) -> list[Completion]:
        """Write one completion for each prompt."""
        tokens = [p.token_ids for p in prompts]
        if self.images is not None and any(p.images is not None for p in prompts):
            assert isinstance(sampler, ImageSampler), "preflight lets only these backends through"
            images = BatchImages([p.images for p in prompts], self.images)
            return sampler.generate_with_images(tokens, images, sampling, row_seeds)
        return sampler.generate(tokens, sampling, row_seeds)

    def gather(self, work: Callable[[], list[Completion]]) -> list[Completion]:
        """Gather all engines' shares on every rank. Collective."""
        shares = distributed.run_and_gather_on_all_ranks(work)
        return [completion for share in shares[:: self.ranks_per_engine] for completion in share]


def _share(count: int, share: int, shares: int, group: int = 1) -> range:
    """The part `share` of `shares` of `count` items, in whole groups."""
    return range(*(count // group * r // shares * group for r in (share, share + 1)))
