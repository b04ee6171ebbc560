"""Rollouts, and a source of steps without an engine: prompts, samples and scores that tests know beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megaswift.config import SwiftConfig
from megaswift.data.batches.collate import PaddingShape
from megaswift.data.batches.epoch_order import EpochOrder
from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.prompts.collate import RolloutCollator, RolloutTokens
from megaswift.data.prompts.source import Prompt, PromptSource
from megaswift.losses.contract import Batch, ModelOutputs, RequestedModelOutputs
from megaswift.rewards.format_and_length_rewards import PerCompletionReward
from megaswift.rollout.sampler import Completion
from megaswift.run.policy_task import rl_settings
from megaswift.trainers.rl.advantages import AdvantageEstimator
from megaswift.trainers.rl.draw_queue import DrawQueue
from megaswift.trainers.rl.scheduler import CompletionSamplingScheduler
from megaswift.trainers.rl.scorer import RewardScorer, ScoredCompletion
from megaswift.trainers.rl.source import RolloutDependencies, RolloutSource


def config(**options: Any) -> SwiftConfig:
    """Of a run of eight completions a step, two of a prompt."""
    usual = {
        "task": "grpo",
        "model": "m",
        "dataset": "d",
        "reward_funcs": ("format",),
        "num_generations": 2,
        "global_batch_size": 8,
        "per_device_train_batch_size": 2,
    }
    return SwiftConfig(**{**usual, **options})


def rollout(total: float, count: int = 3, finished: bool = True, **rewards: float) -> ScoredCompletion:
    """A completion of so many tokens that is worth so much."""
    completion = Completion(tuple(range(10, 10 + count)), tuple(-1.0 - k / 8 for k in range(count)), finished)
    return ScoredCompletion(Prompt(0, (3, 4), "Q", {}), completion, "text", rewards or {"worth": total}, total)


def completed(values: dict[str, list[torch.Tensor]], silent: Sequence[int] = ()) -> list[RolloutTokens]:
    """One completion for each tensor, of as many own tokens."""
    first = next(iter(values.values()))
    return [
        RolloutTokens(
            i,
            (3, 4),
            (0,) * len(v),
            (True,) * len(v),
            {n: (t[i][:0] if i in silent else t[i]).float().numpy() for n, t in values.items()},
            i in silent,
        )
        for i, v in enumerate(first)
    ]


class NoStores:
    """What names the data, in the place of `Documents`."""

    fingerprint = "prompts"
    stores = ()

    def __len__(self) -> int:
        return 64


class Prompts:
    """Prompt k has the one token k + 3."""

    fingerprint = "prompts"

    def __init__(self) -> None:
        self.docs = NoStores()

    def __len__(self) -> int:
        return 64

    def read(self, i: int) -> Prompt:
        """Prompt i."""
        return Prompt(i, (i + 3,), f"Q{i}", {})


class Engine:
    """Scores a token by itself: a log-probability of -token / 100, the reference's twice that, an entropy of token /
    10."""

    times = 1.0

    def score(self, batches: Sequence[Batch], needs: RequestedModelOutputs) -> list[ModelOutputs]:
        """At the labels."""
        (name,) = needs.names if needs.head is None else ("values",)
        return [
            ModelOutputs(**{name: b.labels / 10 if name == "entropy" else -self.times * b.labels / 100})
            for b in batches
        ]

    @contextmanager
    def reference(self) -> Iterator[None]:
        """The reference's numbers inside."""
        self.times = 2.0
        yield
        self.times = 1.0


class Samples:
    """In `Generation`'s place, on the only rank. A completion has its own number's tokens; every third is cut off."""

    speaks_for_replica = True
    sampler = None

    def __init__(self) -> None:
        self.engine = Engine()
        self.synchronized, self.asked = 0, list[int]()
        self.until: Callable[[], object] = bool
        """What a share waits for."""

    def synchronize(self) -> None:
        """Counts."""
        self.synchronized += 1

    def engine_restarts(self) -> None:
        """No engines."""

    def scored_completions(self, count: int, group: int = 1) -> range:
        """All."""
        return range(count)

    def write(self, prompts: Sequence[Prompt], generation: int, greedy_every: int = 0) -> list[Completion]:
        """Two to four tokens that tell generation and number; greedy ones have a single token 7."""
        self.asked.append(generation)
        drafts = [
            Completion(tuple(10 * generation + i + k for k in range(2 + i % 3)), (-0.5,) * (2 + i % 3), i % 3 != 0)
            for i in range(len(prompts))
        ]
        if greedy_every:
            drafts[greedy_every - 1 :: greedy_every] = [Completion((7,), (0.0,), True)] * (len(prompts) // greedy_every)
        return drafts

    def write_share(
        self, prompts: Sequence[Prompt], generation: int, greedy_every: int = 0, *_: object
    ) -> list[Completion]:
        """The same, in a thread."""
        self.until()
        return self.write(prompts, generation, greedy_every)

    @staticmethod
    def gather(work: Callable[[], list[Completion]]) -> list[Completion]:
        """There is no other rank."""
        return work()


def source(worth: Any = None, shares: bool = False, **options: Any) -> RolloutSource:
    """A source of a run with `options`; rewards are `worth` of a sample, its number of tokens if not given. `shares`:
    completions of a prompt have it once."""
    cfg = config(**options)
    settings = rl_settings(cfg, 1)
    judge = RewardScorer(
        [PerCompletionReward("worth", worth or (lambda s: float(len(s.token_ids))))],
        [1.0],
        lambda ids: " ".join(map(str, ids)),
    )
    width = cfg.train.per_device_train_batch_size
    geometry = LoaderGeometry(per_device=width, accumulation=settings.batch // width)
    prompts: Any = Prompts()
    samples: Any = Samples()
    drawing = CompletionSamplingScheduler(
        PromptSource(prompts, settings.generation // settings.group, EpochOrder(len(prompts), False, 0)),
        samples,
        settings.draws,
        DrawQueue(settings.max_staleness, settings.steps),
        settings.draws > settings.group,
    )
    parts = RolloutDependencies(
        drawing,
        judge,
        AdvantageEstimator(cfg.rl, settings, settings.beta),
        RolloutCollator(PaddingShape(), True, False, shares_prefixes=shares),
        geometry,
    )
    return RolloutSource(settings, parts)


def told(batches: Sequence[Batch]) -> list[dict[str, list[Any]]]:
    """Tokens, weights and fields as lists."""
    return [
        {
            "input_ids": b.input_ids.tolist(),
            "loss_weights": b.loss_weights.tolist(),
            **{n: v.tolist() for n, v in b.fields.items()},
        }
        for b in batches
    ]
