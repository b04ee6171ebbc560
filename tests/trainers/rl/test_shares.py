"""Which completions a rank writes: of those that have samplers, each its part, in the order of the ranks.

Covers: megaswift/trainers/rl/generation.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megaswift import distributed
from megaswift.data.prompts.source import Prompt
from megaswift.engine.protocol import Receivers
from megaswift.parallel.layout import Layout
from megaswift.rollout.sampler import Completion, SamplingParams
from megaswift.trainers.rl.generation import (
    CompletionGenerator,
    completion_seeds,
    is_sampling_rank,
)

LAYOUT = Layout(8, tp=2, pp=2)
_SAMPLER: Any = object()


@pytest.mark.parametrize(("to", "samplers"), [("rank0", 2), ("replicas", 2), ("all", 8)])
def test_shares_are_whole_groups_and_nothing_is_written_twice(
    to: Receivers, samplers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where every rank has an engine. One rank a replica speaks for it, whoever samples; servers get weights from
    one."""
    engine: Any = SimpleNamespace(layout=LAYOUT)
    found, speaking, sending = [], 0, 0
    for rank in range(8):
        monkeypatch.setattr(distributed, "global_rank", lambda rank=rank: rank)
        at = LAYOUT.coordinates(rank)
        sampler: Any = object() if to == "all" or is_sampling_rank(at) else None
        made = CompletionGenerator(engine, at, sampler, SamplingParams(1), 0, receivers=to)
        assert list(made.sampled_completions(20)) == list(made.scored_completions(20))
        found.append(made.scored_completions(20, 2))
        speaking += made.speaks_for_replica
        sending += made.sends_weights
    assert [i for share in found for i in share] == list(range(20)) and speaking == 2
    assert sending == (1 if to == "rank0" else samplers)
    assert sum(bool(share) for share in found) == samplers and all(len(share) % 2 == 0 for share in found)


def test_ranks_of_one_engine_sample_the_same_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is written by one engine, joined once, and scored by one rank."""
    engine: Any = SimpleNamespace(layout=LAYOUT)
    sampled, scored, made = [], [], None
    for rank in range(8):
        monkeypatch.setattr(distributed, "global_rank", lambda rank=rank: rank)
        made = CompletionGenerator(
            engine, LAYOUT.coordinates(rank), _SAMPLER, SamplingParams(1), 0, receivers="all", ranks_per_engine=2
        )
        sampled.append(list(made.sampled_completions(20)))
        scored += made.scored_completions(20, 2)
    assert sampled[::2] == sampled[1::2] == [[*range(i, i + 5)] for i in range(0, 20, 5)] and scored == [*range(20)]
    monkeypatch.setattr(distributed, "run_and_gather_on_all_ranks", lambda _: sampled)
    joined: Any = made.gather(lambda: [])  # type: ignore[union-attr]
    assert joined == [*range(20)]


@pytest.mark.parametrize("replicas", [1, 2])
def test_every_third_completion_is_greedy(replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On any number of ranks: in order, sampled by their own seeds, and the greedy ones at temperature 0."""

    class Recorder:
        def generate(self, prompts: list[Any], sampling: SamplingParams, row_seeds: list[int]) -> list[Any]:
            return [(p, sampling.temperature, s) for p, s in zip(prompts, row_seeds, strict=True)]

    layout = Layout(replicas)
    engine: Any = SimpleNamespace(layout=layout)
    prompts: Any = [SimpleNamespace(token_ids=(i,)) for i in range(12)]
    drafts: list[Any] = []
    for rank in range(replicas):
        monkeypatch.setattr(distributed, "global_rank", lambda rank=rank: rank)
        sampler: Any = Recorder()
        made = CompletionGenerator(engine, layout.coordinates(rank), sampler, SamplingParams(1, temperature=0.8), 5)
        drafts += made.write_share(prompts, 4, greedy_every=3)
        assert {t for _, t, _ in made.write_share(prompts, 4)} == {0.8}
    drawn = completion_seeds(5, 4, 12)
    assert drafts == [((i,), 0.0 if i % 3 == 2 else 0.8, drawn[i]) for i in range(12)]


def test_each_completion_goes_on_from_what_is_written_of_it() -> None:
    """With its own prompt and seed; one that has ended is not asked for."""

    class Extends:
        seeds: Sequence[int] = ()

        def extend(self, prompts: Any, begun: Any, sampling: Any, seeds: Any, stop: Any) -> list[Completion]:
            self.seeds = seeds
            pairs = zip(prompts, begun, strict=True)
            return [Completion((*one.token_ids, prompt[0]), (*one.logprobs, -1.0), True) for prompt, one in pairs]

    engine: Any = SimpleNamespace(layout=Layout(1))
    sampler: Any = Extends()
    made = CompletionGenerator(engine, engine.layout.coordinates(0), sampler, SamplingParams(4), 7)
    prompts = [Prompt(i, (i + 3,), "Q", {}) for i in range(3)]
    begun = [Completion((9,), (-0.5,), True), Completion((8,), (-0.5,), False), Completion((), (), False)]
    written = made.write_share(prompts, 2, 0, begun, bool)
    assert [one.token_ids for one in written] == [(9,), (8, 4), (5,)]
    assert sampler.seeds == completion_seeds(7, 2, 3)[1:]
