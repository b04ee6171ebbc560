"""Arithmetic of generations: prompts and completions per generation, and optimizer steps per generation.

completions of a generation = prompts x num_generations = optimizer steps x global_batch_size
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any

from megaswift.config.sections import Sections
from megaswift.errors import ConfigError, Problem
from megaswift.log import count_text
from megaswift.options.tasks import PPO, RL
from megaswift.trainers.options.batch_sizes import batch_plan
from megaswift.trainers.options.training import TrainConfig
from megaswift.trainers.rl.options.derived import DEFAULT_GENERATIONS, generations_per_prompt_of


@dataclass(frozen=True)
class GenerationBatchPlan:
    """The numbers of one generation, over all ranks."""

    completions: int
    prompts: int
    generations: int
    """Completions of each prompt."""
    batches: int
    """Global batches that the completions make."""
    iterations: int
    """Times that each is trained on."""

    @property
    def steps(self) -> int:
        """Optimizer steps from one generation to the next."""
        return self.batches * self.iterations


def generation_batch_plan(c: Sections, dp: int) -> GenerationBatchPlan:
    """The plan on `dp` data-parallel ranks; ConfigError when the numbers do not fit each other."""
    plan = batch_plan(c.train, dp)
    problems = list(_problems(c, plan.global_batch_size, plan.per_device * dp, {}))
    if problems:
        raise ConfigError(problems)
    total = _completions(c, plan.global_batch_size, plan.per_device * dp)
    group = generations_per_prompt_of(c)
    generation = GenerationBatchPlan(total, total // group, group, total // plan.global_batch_size, c.rl.num_iterations)
    rollout = c.rollout
    unfit = []
    bound = f"max_staleness {rollout.max_staleness}: a generation takes {count_text(generation.steps, 'step')}, so"
    if c.train.deterministic and rollout.replay_rollouts is None and rollout.max_staleness > generation.steps:
        rule = f"conflicts with {bound} the weights that write a completion depend on timing"
        unfit.append(Problem("--deterministic true", rule, f"--max_staleness {generation.steps}"))
    if rollout.max_staleness <= generation.steps:
        rule = f"has no effect with {bound}"
        fix = f"--max_staleness {2 * generation.steps}"
        if rollout.partial_rollouts:
            why = "no completion is under way when weights are sent"
            unfit.append(Problem("--partial_rollouts true", f"{rule} {why}", fix))
        if rollout.staleness_strategy == "drop":
            unfit.append(Problem("--staleness_strategy drop", f"{rule} there is one draw at a time", fix))
    if unfit:
        raise ConfigError(unfit)
    return generation


BATCH_OPTIONS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "global_batch_size",
    "generation_batch_size",
    "steps_per_generation",
)


@dataclass(frozen=True)
class DefaultGradientAccumulation:
    """Forward passes of a step that were not chosen."""

    number: int
    text: str
    """The notice shown to the user."""


def default_rl_accumulation_steps(task: str | None, values: Mapping[str, Any]) -> DefaultGradientAccumulation | None:
    """`gradient_accumulation_steps` of a run that has no batch size but `per_device_train_batch_size`: as many as
    whole groups take, on any number of ranks. None where another was given, or one pass is enough."""
    if task not in RL or any(values.get(name) is not None for name in BATCH_OPTIONS[1:]):
        return None
    rows = values.get("per_device_train_batch_size") or TrainConfig().per_device_train_batch_size
    group = values.get("num_generations") or (1 if task in PPO else DEFAULT_GENERATIONS)
    passes = lcm(group, rows) // rows
    text = (
        f"gradient_accumulation_steps is {passes}, since no batch size was given and num_generations is {group}: "
        f"a step trains on {rows * passes} completions per data-parallel rank (change it with --global_batch_size)"
    )
    return DefaultGradientAccumulation(passes, text) if passes > 1 else None


def generation_batch_problems(c: Sections, labels: Mapping[str, str]) -> Iterator[Problem]:
    """Problems that can be found before the number of ranks is known."""
    train = c.train
    dp = c.parallel.data_parallel_size
    passes = train.gradient_accumulation_steps
    wide = train.per_device_train_batch_size * dp if dp else None
    batch = train.global_batch_size or (wide * (passes or 1) if wide else None)
    if batch is None and c.rl.generation_batch_size is None:
        return
    yield from _problems(c, batch, wide, labels)


def _completions(c: Sections, batch: int, wide: int) -> int:
    if c.rl.generation_batch_size is not None:
        return c.rl.generation_batch_size
    return batch if c.rl.steps_per_generation is None else c.rl.steps_per_generation * wide


def _problems(c: Sections, batch: int | None, wide: int | None, labels: Mapping[str, str]) -> Iterator[Problem]:
    """`batch`: completions an optimizer step; `wide`: those of one forward pass over all ranks."""
    total = c.rl.generation_batch_size
    passes = c.rl.steps_per_generation
    group = generations_per_prompt_of(c)
    name = "generation_batch_size"
    value = total
    if total is None and passes is not None:
        if wide is None:
            return
        name = "steps_per_generation"
        value = passes
        total = passes * wide
    elif total is None:
        name = "global_batch_size"
        value = batch
        total = batch
    assert total is not None
    what = labels.get(name, f"--{name} {value}")
    subject = "" if name != "steps_per_generation" else f"{passes} passes of {wide} completions are {total}, which "
    multiple = lcm(group, (wide if name == "global_batch_size" else batch) or 1)
    near = max(1, round(total / multiple)) * multiple
    if name == "steps_per_generation":
        assert wide is not None
        fix = f"--steps_per_generation {lcm(multiple, wide) // wide}"
    else:
        fix = f"--{name} {near}"
    if batch is not None and total % batch:
        yield Problem(what, f"{subject}is not a multiple of the {batch} completions of a global batch", fix)
    if total % group:
        unset = "" if c.rl.num_generations is not None else ", which is the default"
        yield Problem(
            what,
            f"{subject}is not a multiple of num_generations {group}{unset}: some prompts would have fewer completions",
            fix,
        )
