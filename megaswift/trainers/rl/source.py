"""The batch source of reinforcement learning: prompts, completions, rewards, advantages, micro-batches.

Owns the order of a generation and what of it outlives a restart. `generation.py` samples, `scorer.py` scores,
`advantages.py` estimates advantages, and `data/prompts/collate.py` places the numbers in micro-batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from megaswift import distributed
from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.prompts.collate import (
    RolloutCollator,
    RolloutMicrobatch,
    RolloutTokens,
    gather_completion_values,
)
from megaswift.data.prompts.images import PromptImages
from megaswift.data.prompts.source import Prompt
from megaswift.engine.protocol import Engine
from megaswift.errors import CheckpointError, Problem
from megaswift.losses.advantages import entropy_threshold
from megaswift.losses.contract import Batch, RequestedModelOutputs
from megaswift.losses.options.estimator_table import advantage_estimator_entry
from megaswift.trainers.hook import StepExtras, timed
from megaswift.trainers.rl.advantages import AdvantageEstimator
from megaswift.trainers.rl.critic import CriticTrainer
from megaswift.trainers.rl.generation import completion_seeds
from megaswift.trainers.rl.metrics import group_rewards_differ, rollout_statistics, staleness_metrics
from megaswift.trainers.rl.multi_turn import MultiTurnCompletion, model_token_mask
from megaswift.trainers.rl.record import Generation, RolloutReader, RolloutWriter, generation_of
from megaswift.trainers.rl.scheduler import CompletionSamplingScheduler
from megaswift.trainers.rl.scorer import RewardScorer, ScoredCompletion
from megaswift.trainers.rl.settings import RlSettings

NOTHING = np.zeros(0, dtype=np.float32)


CompletionScores = dict[int, np.ndarray]
"""float32 [own tokens] of each completion, by its number."""
TeacherScores = Callable[[Sequence[RolloutTokens], RequestedModelOutputs], CompletionScores]
"""All completions and the output that is asked for to a teacher's numbers for all of them. Collective."""


@dataclass(frozen=True)
class RolloutDependencies:
    """The objects with which a `RolloutSource` makes its batches."""

    scheduler: CompletionSamplingScheduler
    scorer: RewardScorer
    estimator: AdvantageEstimator
    layout: RolloutCollator
    geometry: LoaderGeometry
    critic: CriticTrainer | None = None
    teacher: TeacherScores | None = None
    record: RolloutWriter | None = None
    """By which rank 0 saves generations."""
    replay: RolloutReader | None = None
    """By which rank 0 reads generations; the run then has no sampler."""


class RolloutSource:
    """Yields this rank's micro-batches, one optimizer step at a time, and samples a new generation when the present one
    is used up."""

    def __init__(self, settings: RlSettings, parts: RolloutDependencies) -> None:
        self.settings = settings
        self.parts = parts
        self.generations = 0
        """Generations that were begun."""
        self.completed: list[RolloutTokens] = []
        """Completions of the present generation, in the order of their numbers; the same on every rank."""
        self.steps_taken = settings.steps
        """Optimizer steps taken on the present generation."""
        self.steps_begun = 0
        """Optimizer steps of the run."""
        self.fresh: list[tuple[ScoredCompletion, np.ndarray]] = []
        """Completions that the last step was the first to use, each with the advantages of the tokens that the model
        wrote; none for a completion that is not trained on."""
        self.metrics: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self.began = 0.0
        """When the last step began."""
        self.written = 0.0
        """Seconds in which this rank's sampler had been writing by then."""

    @property
    def epoch(self) -> float:
        """Passes over the prompts so far."""
        return self.parts.scheduler.prompts.epoch

    @property
    def data_fingerprint(self) -> str:
        """The fingerprint of the prompts."""
        return self.parts.scheduler.prompts.prompts.fingerprint

    def next(self) -> list[Batch]:
        """Return the micro-batches of the next optimizer step. Collective."""
        self.seconds = {}
        self.fresh = []
        self.began = time.perf_counter()
        self.written = self.parts.scheduler.clock.seconds()
        if self.steps_taken >= self.settings.steps:
            self.generate()
        else:
            self.begin_ahead()
        micros = self.own_microbatches(self.steps_taken % self.settings.slices)
        self.steps_taken += 1
        self.steps_begun += 1
        if self.settings.top_entropy_quantile < 1.0:
            with self.timed("scoring"):
                micros = self.with_high_entropy_tokens(micros)
        if self.settings.needs_covariances:
            with self.timed("scoring"):
                micros = self.with_high_covariance_tokens(micros)
        return self.parts.layout.batches(micros)

    def step_extras(self) -> StepExtras:
        """Return metrics of the generation of the last step, and where the time went."""
        metrics = self.metrics
        seconds = dict(self.seconds)
        critic = self.parts.critic
        if critic is not None:
            metrics = metrics | critic.metrics
            seconds["critic"] = critic.seconds
        times = {f"time/{part.replace(' ', '_')}": spent for part, spent in seconds.items()} | self.idle_shares()
        return StepExtras(metrics | times, seconds, sum(self.seconds.values()), "time/training")

    def idle_shares(self) -> dict[str, float]:
        """Measure the shares of the last step's time in which the trainer waited for completions, and in which this
        rank's sampler had none to write."""
        if self.parts.replay is not None:
            return {}
        written = self.parts.scheduler.clock.seconds() - self.written
        passed = time.perf_counter() - self.began
        waited = self.seconds.get("generation", 0.0)
        return {"time/trainer_idle_share": waited / passed, "time/sampler_idle_share": 1 - written / passed}

    def generate(self) -> None:
        """Make a new generation, ready for its first step."""
        # Completions with their rewards; then the sampler goes on in the background.
        dropped = self.parts.scheduler.dropped
        rollouts = self.sample()
        self.completed = [scored_completion_to_rollout_tokens(i, r, self.settings) for i, r in enumerate(rollouts)]
        self.steps_taken = 0
        self.begin_ahead()

        # What the loss reads of each token: log-probabilities, values, advantages.
        with self.timed("scoring"):
            self.add_scores()
        fields = self.parts.estimator(rollouts, self.completed)
        for name, values in fields.items():
            self.set_field(name, dict(enumerate(values)))

        # Metrics, and the lines of completions.jsonl.
        self.metrics = rollout_statistics(rollouts, self.settings.group) | self.parts.estimator.metrics
        own = np.concatenate(fields["advantages"]) if any(map(len, fields["advantages"])) else np.zeros(1)
        self.metrics |= {"advantages/mean": float(own.mean()), "advantages/std": float(own.std())}
        if self.settings.max_staleness:
            self.metrics |= staleness_metrics([r.completion for r in rollouts], self.steps_begun)
        scheduler = self.parts.scheduler
        if self.settings.max_staleness and self.parts.replay is None:
            self.metrics["sampling/queue"] = float(len(scheduler.queue.draws))
            if scheduler.queue.overtakes:
                self.metrics["sampling/dropped"] = float(dropped)
        if (restarts := scheduler.generation.engine_restarts()) is not None:
            self.metrics["sampling/engine_restarts"] = float(restarts)
        self.fresh = [*zip(rollouts, fields["advantages"], strict=True)]

    @property
    def due(self) -> int:
        """Optimizer steps of the run when the next generation begins."""
        return self.steps_begun + self.settings.steps - self.steps_taken

    def begin_ahead(self) -> None:
        """Let the sampler begin the draws that the bound on staleness permits. Collective."""
        if self.settings.max_staleness and self.parts.replay is None:
            self.parts.scheduler.begin_ahead(self.steps_begun, self.due, self.timed)

    def sample(self) -> list[ScoredCompletion]:
        """Draw prompts, completions and rewards; groups without spread are drawn again where `dynamic_sample` asks for
        it. A run that replays reads them."""
        if self.parts.replay is not None:
            return self.read(self.parts.replay)
        settings = self.settings
        scheduler = self.parts.scheduler
        number = self.generations
        taken: list[Prompt] = []
        drawn_places: list[int] = []
        seeds: list[int] = []
        selected: list[tuple[int, ScoredCompletion]] = []
        spare: list[tuple[int, ScoredCompletion]] = []
        for _ in range(settings.tries):
            draw_number, draw = scheduler.draw(self.steps_begun, self.timed)
            prompts = draw.prompts
            completions = draw.completions
            assert completions is not None
            drawn_places += draw.places
            seeds += completion_seeds(settings.seed, draw_number, len(prompts))
            self.generations += 1
            with self.timed("rewards"):
                rollouts = self.parts.scorer(
                    prompts, completions, scheduler.generation.scored_completions(len(prompts), settings.draws)
                )
            for start in range(0, len(rollouts), settings.draws):
                group = split_off_greedy_baseline(rollouts[start : start + settings.draws], settings.group)
                numbered = [*enumerate(group, len(taken) + start)]
                if settings.tries == 1 or group_rewards_differ(group, settings.each_reward):
                    selected += numbered
                else:
                    spare += numbered
            taken += prompts
            if len(selected) >= settings.generation:
                break
        places, found = zip(*(selected + spare)[: settings.generation], strict=True)
        if self.parts.record is not None:
            asked = tuple(taken[place].token_ids for place in places)
            drawn = tuple(seeds[place] for place in places)
            head = (number, self.generations - number, places, drawn, asked)
            generation = Generation(*head, found, tuple(drawn_places), settings.temperature)
            distributed.run_on_rank0(partial(self.parts.record.write, generation))
        return [*found]

    def read(self, reader: RolloutReader) -> list[ScoredCompletion]:
        """Return the recorded generation of the present number, and move the prompts on past it. Collective."""
        number = self.generations
        state = distributed.run_on_rank0(lambda: reader.read(number))
        scheduler = self.parts.scheduler
        places = state.get("drawn")
        if places is None:  # a record of the first format, whose draws have the prompts in order
            places = [place for _ in range(state["draws"]) for place in scheduler.prompts.take()]
        scheduler.prompts.skip_to(places)
        taken = scheduler.prompts_at(places)
        self.generations += state["draws"]
        scheduler.queue.trained = self.generations - 1  # a run that goes on without a record draws further seeds
        return [*generation_of(state, taken, self.parts.scorer.decode).rollouts]

    def add_scores(self) -> None:
        """Add the fields that the run needs: log-probabilities of the policy before its first step on the generation
        and of the reference, and the critic's values. Collective."""
        settings = self.settings
        engine = self.parts.scheduler.generation.engine
        critic = self.parts.critic
        needs = RequestedModelOutputs(temperature=settings.temperature)
        if settings.needs_old:
            self.set_field("old", self.rollout_logprobs() or self.score_completions(engine, needs))
        if settings.beta:
            with engine.reference():
                self.set_field("reference", self.score_completions(engine, needs))
        if self.parts.teacher is not None:
            self.set_field("teacher", self.parts.teacher(self.completed, needs))
        if critic is not None:
            self.set_field("values", self.score_completions(critic.engine, critic.loss.needs))

    def rollout_logprobs(self) -> CompletionScores:
        """Return the sampler's log-probabilities, where the run takes them as the old policy's and all are known."""
        sampled = {c.number: c.values["sampled"] for c in self.completed if not c.silent}
        known = self.settings.use_rollout_logprobs and not any(np.isnan(v).any() for v in sampled.values())
        return sampled if known else {}

    def score_completions(self, engine: Engine, needs: RequestedModelOutputs) -> CompletionScores:
        """Compute one number for each token of all completions, as `needs` says. Collective."""
        micros = [micro for k in range(self.settings.slices) for micro in self.own_microbatches(k)]
        return compute_rollout_token_outputs(
            engine, micros, self.parts.layout, needs, self.parts.scheduler.generation.speaks_for_replica
        )

    def set_field(self, name: str, numbers: CompletionScores) -> None:
        """Add a field to every completion; silent completions get no numbers."""
        self.completed = [
            replace(c, values={**c.values, name: NOTHING if c.silent else numbers[c.number]}) for c in self.completed
        ]

    def own_microbatches(self, part: int) -> list[RolloutMicrobatch]:
        """Return this rank's micro-batches of one of the generation's optimizer steps, as completions."""
        order = np.random.default_rng([self.settings.seed, self.generations]).permutation(len(self.completed))
        which = order[part * self.settings.batch : (part + 1) * self.settings.batch].tolist()
        if self.parts.layout.shares_prefixes:
            # The completions of a prompt stand side by side, at the place of the first of them.
            prompts = [tuple(self.completed[i].prompt) for i in which]
            first = {prompt: place for place, prompt in reversed([*enumerate(prompts)])}
            which = [i for _, i in sorted(zip((first[p] for p in prompts), which, strict=True), key=lambda e: e[0])]
        return [[self.completed[i] for i in micro] for micro in self.parts.geometry.own(which)]

    def with_high_entropy_tokens(self, micros: list[RolloutMicrobatch]) -> list[RolloutMicrobatch]:
        """Add `keep`: the tokens whose entropy is in the upper part, over all ranks (arXiv:2506.01939)."""
        needs = RequestedModelOutputs(fields=frozenset({"entropy"}), temperature=self.settings.temperature)
        entropies = compute_rollout_token_outputs(
            self.parts.scheduler.generation.engine,
            micros,
            self.parts.layout,
            needs,
            self.parts.scheduler.generation.speaks_for_replica,
        )
        every = np.concatenate([*entropies.values()]) if entropies else NOTHING
        threshold = 0.0
        if len(every):
            threshold = float(entropy_threshold(torch.from_numpy(every), self.settings.top_entropy_quantile))
        return [
            [
                None
                if c is None
                else replace(c, values={**c.values, "keep": entropies.get(c.number, NOTHING) >= threshold})
                for c in micro
            ]
            for micro in micros
        ]

    def with_high_covariance_tokens(self, micros: list[RolloutMicrobatch]) -> list[RolloutMicrobatch]:
        """Add `selected`: the tokens of high covariance, over all ranks (arXiv:2505.22617)."""
        engine = self.parts.scheduler.generation.engine
        first = self.parts.scheduler.generation.speaks_for_replica
        needs = RequestedModelOutputs(temperature=self.settings.temperature)
        logprobs = compute_rollout_token_outputs(engine, micros, self.parts.layout, needs, first)
        numbers = sorted(n for n, v in logprobs.items() if len(v))
        seed = [self.settings.seed, self.generations, self.steps_taken]
        values = [self.completed[n].values for n in numbers]
        chosen = self.parts.estimator.select_tokens(
            [logprobs[n] for n in numbers],
            [v["advantages"] for v in values],
            [v.get("old", logprobs[n]) for n, v in zip(numbers, values, strict=True)],
            seed,
        )
        selected = dict(zip(numbers, chosen, strict=True))
        nothing = NOTHING.astype(bool)
        return [
            [
                None if c is None else replace(c, values={**c.values, "selected": selected.get(c.number, nothing)})
                for c in micro
            ]
            for micro in micros
        ]

    def timed(self, part: str) -> AbstractContextManager[None]:
        """Return a context that adds the time of its block to a part of the step."""
        return timed(self.seconds, part)

    def mark(self) -> Callable[[], None]:
        """Return a function that takes the source back to its present position, in this process. Cheap: a draw that is
        under way stays under way."""
        attributes = dict(vars(self))
        estimator = self.parts.estimator
        draws_back = self.parts.scheduler.mark()
        weights = estimator.state_dict()

        def back() -> None:
            vars(self).update(attributes)
            draws_back()
            estimator.load_state_dict(weights)

        return back

    def state_dict(self) -> dict[str, Any]:
        """Return the position, with a generation that is not used up. Collective."""
        unused = self.completed if self.steps_taken < self.settings.steps else []
        return {
            "queue": self.parts.scheduler.state_dict(),
            "generations": self.generations,
            "used": self.steps_taken,
            "steps": self.steps_begun,
            "estimator": self.parts.estimator.state_dict(),
            "metrics": dict(self.metrics),
            "completed": [rollout_tokens_to_dict(c) for c in unused],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position. CheckpointError where the checkpoint has none of the queue."""
        if "trained" not in state.get("queue", {}):
            raise CheckpointError(
                Problem(
                    "--resume_from_checkpoint",
                    "the checkpoint has no queue of draws, so this version cannot restore the position in the prompts",
                    "--ignore_data_skip true keeps weights and optimizer and starts with the first prompt; or use the "
                    "version that saved it",
                )
            )
        self.generations = int(state["generations"])
        self.steps_taken = int(state["used"])
        self.steps_begun = int(state["steps"])
        self.metrics = dict(state["metrics"])
        self.completed = [rollout_tokens_from_dict(c) for c in state["completed"]]
        if len(self.completed) != self.settings.generation:  # used up, or a run whose generations had another size
            self.steps_taken = self.settings.steps
            self.completed = []
        self.parts.scheduler.load_state_dict(state["queue"], self.due)
        self.parts.estimator.load_state_dict(state["estimator"])


def split_off_greedy_baseline(draws: list[ScoredCompletion], group: int) -> list[ScoredCompletion]:
    """Return the first `group` rollouts of a prompt. The total reward of one more, the greedy one, is their
    baseline."""
    return draws if len(draws) == group else [replace(r, baseline=draws[group].total) for r in draws[:group]]


def scored_completion_to_rollout_tokens(number: int, rollout: ScoredCompletion, settings: RlSettings) -> RolloutTokens:
    """Convert a rollout to what the loss reads. A critic learns nothing from a completion that no reward function
    applies to."""
    completion = rollout.completion
    masked = settings.mask_truncated and not completion.finished
    unrewarded = advantage_estimator_entry(settings.estimator).critic and math.isnan(rollout.total)
    silent = masked or unrewarded
    values = {"sampled": NOTHING if silent else np.asarray(completion.logprobs, dtype=np.float32)}
    return RolloutTokens(
        number,
        rollout.prompt.token_ids,
        completion.token_ids,
        model_token_mask(completion),
        values,
        silent,
        rollout.prompt.images,
        completion.further if isinstance(completion, MultiTurnCompletion) else (),
    )


def rollout_tokens_to_dict(c: RolloutTokens) -> dict[str, Any]:
    """Convert a completion to plain values, which keep float32 exactly."""
    values = {name: [str(v.dtype), v.tolist()] for name, v in c.values.items()}
    return {
        "number": c.number,
        "prompt": [*c.prompt],
        "written": [*c.written],
        "own": [*map(int, c.own)],
        "values": values,
        "silent": c.silent,
        "further": [[place, [*prompt]] for place, prompt in c.further],
        **({} if c.images is None else {"images": c.images.to_dict()}),
    }


def rollout_tokens_from_dict(state: Mapping[str, Any]) -> RolloutTokens:
    """Build a completion from what `rollout_tokens_to_dict` returned."""
    values = {name: np.asarray(v, dtype=dtype) for name, (dtype, v) in state["values"].items()}
    own = [*map(bool, state["own"])]
    images = PromptImages.from_dict(state.get("images"))
    further = [(place, prompt) for place, prompt in state.get("further", ())]
    text = (state["prompt"], state["written"], own)
    return RolloutTokens(state["number"], *text, values, state["silent"], images, further)


def compute_rollout_token_outputs(
    engine: Engine,
    micros: Sequence[RolloutMicrobatch],
    layout: RolloutCollator,
    needs: RequestedModelOutputs,
    first: bool,
) -> CompletionScores:
    """Compute the one output that `needs` names for all ranks' completions. `first`: this rank stands for its
    data-parallel replica. Collective."""
    (name,) = needs.names if needs.head is None else ("values",)
    batches = layout.batches(micros)
    scores: CompletionScores = {}
    for batch, outputs, micro in zip(batches, engine.score(batches, needs), micros, strict=True):
        scores |= gather_completion_values(batch, getattr(outputs, name), micro)
    return distributed.all_gather_merged_dict(scores if first else {})
