"""Puts a policy's source together on a rank: sampler, rewards, settings. Owns which part gets which option."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megaswift.config import SwiftConfig
from megaswift.config.rl_batch import generation_plan
from megaswift.config.rl_defaults import estimator_of
from megaswift.config.size import bytes_text
from megaswift.data import build as data
from megaswift.data import vocabulary
from megaswift.data.completions import Layout
from megaswift.data.prompts import Prompt, Prompts, PromptSource, prompts_of
from megaswift.engine.protocol import Engine
from megaswift.errors import DataError
from megaswift.families.model_source import tokenizer_of
from megaswift.inference.sync_folder import Rounds
from megaswift.log import amount
from megaswift.losses.value import Value
from megaswift.trainers.flops import rule_of
from megaswift.trainers.hook import Hook
from megaswift.trainers.reference import Reference
from megaswift.trainers.rewards.contract import missing_columns
from megaswift.trainers.rl.adapters import goes_alone, merged_because, rank_of
from megaswift.trainers.rl.alarms import Alarms
from megaswift.trainers.rl.conversation import Talk
from megaswift.trainers.rl.critic import Critic, critic_engine
from megaswift.trainers.rl.drawing import Drawing
from megaswift.trainers.rl.environment import Checked, environment_class
from megaswift.trainers.rl.estimate import Estimator
from megaswift.trainers.rl.evaluation import RewardEvaluation
from megaswift.trainers.rl.generation import Generation
from megaswift.trainers.rl.judge import Judge
from megaswift.trainers.rl.record import Record
from megaswift.trainers.rl.rewards import rewards_of, weights_of
from megaswift.trainers.rl.sampler import sampler_of, samples_everywhere, sampling_of, sync_folder
from megaswift.trainers.rl.settings import settings_of
from megaswift.trainers.rl.source import Parts, RolloutSource
from megaswift.trainers.screen import Facts, trained_text

if TYPE_CHECKING:
    from megaswift.trainers.build import Build
    from megaswift.trainers.loop import Loop

CRITIC = "critic"
"""Within a checkpoint."""
LOOKED_AT = 20_000
"""Prompts whose columns are compared with what rewards need, before training."""
Rate = Callable[[int], float]


def prompts(build: Build) -> tuple[PromptSource, list[Prompt]]:
    """What completions are asked for, and the held-out ones; the tokenizer is the build's from here on."""
    cfg = build.cfg
    build.tokenizer = tokenizer_of(cfg, build.folder)
    plan = generation_plan(cfg, build.layout.dp)
    source, held = prompts_of(cfg, build.tokenizer, plan.prompts, plan.steps)
    vocabulary.check([source.prompts.docs], build.tokenizer, build.spec.vocab_size)
    if problems := missing_columns(rewards_of(cfg), common_columns(source.prompts)):
        raise DataError(problems)
    return source, held or []


def common_columns(prompts: Prompts) -> frozenset[str]:
    """Columns that every row has, as far as looked at."""
    return frozenset.intersection(*(frozenset(prompts.read(i).columns) for i in range(min(len(prompts), LOOKED_AT))))


def with_more(facts: Facts, build: Build, source: PromptSource, critic: Engine | None) -> Facts:
    """The first screen's rows about sampling, rewards and critic; an epoch passes over each prompt once."""
    cfg, plan = build.cfg, generation_plan(build.cfg, build.layout.dp)
    names = (*cfg.rl.reward_funcs, *cfg.rl.reward_model)
    judges = ", ".join(f"{name} x {weight:g}" for name, weight in zip(names, weights_of(cfg), strict=True))
    samplers = build.layout.world_size if samples_everywhere(cfg) else build.layout.dp
    sampling = (
        f"{amount(plan.generations, 'completion')} each of {amount(plan.prompts, 'prompt')} at a time, up to "
        f"{cfg.rl.max_completion_length} tokens, by {cfg.rl.rollout_backend} on {amount(samplers, 'rank')}, "
        f"for {amount(plan.steps, 'step')}"
    )
    rows = source.rows * plan.generations * plan.iterations
    more = (
        ("sampling", sampling),
        *weight_sync(build),
        ("rewards", judges),
        *(() if critic is None else critic_row(cfg, critic)),
    )
    return replace(facts, rows_per_epoch=rows, more=more)


def weight_sync(build: Build) -> Iterator[tuple[str, str]]:
    """Of a run with adapters: what its samplers get."""
    if build.adapts:
        cfg, alone = build.cfg, goes_alone(build.cfg, build.spec, build.folder)
        why = merged_because(cfg, build.spec, build.folder) if cfg.rl.rollout_lora is None else "rollout_lora is false"
        yield (
            "weight sync",
            f"adapters alone, of rank {rank_of(cfg)}" if alone else f"all weights, adapters merged in: {why}",
        )


def critic_row(cfg: SwiftConfig, critic: Engine) -> Iterator[tuple[str, str]]:
    """What PPO's second model is and costs. Collective."""
    sizes, start = critic.report(), cfg.rl.critic_model or "the model as it starts"
    held = bytes_text(sizes.weight_bytes + sizes.gradient_bytes + sizes.optimizer_bytes)
    rate = cfg.rl.critic_learning_rate or cfg.optim.learning_rate
    yield (
        "critic",
        (
            f"{start}, with a scalar head: {sizes.parameters_total:,} parameters{trained_text(sizes)}, {held} more on "
            f"the largest rank, learning rate {rate:g}"
        ),
    )


class Closing(Hook):
    """Ends what samples."""

    def __init__(self, drawing: Drawing) -> None:
        self.drawing = drawing

    def close(self) -> None:
        """The draw under way first."""
        self.drawing.close()
        self.drawing.generation.close()


def critic(build: Build, rate: Rate, total_steps: int) -> Critic | None:
    """The critic of a run that has one."""
    cfg = build.scheduled(total_steps)
    if estimator_of(cfg) != "gae":
        return None
    engine = critic_engine(cfg, build.spec, build.folder, build.context, fresh=build.resumed is None)
    share = (cfg.rl.critic_learning_rate or cfg.optim.learning_rate) / cfg.optim.learning_rate
    return Critic(engine, Value(cfg.rl.cliprange_value, cfg.rl.vf_coef), lambda step: share * rate(step))


def talk_of(cfg: SwiftConfig, tokenizer: Any) -> Talk | None:
    """How conversations go, where the run has an environment."""
    text = cfg.rl.environment
    if text is None:
        return None
    made = environment_class(text)
    return Talk(lambda: Checked(f"--environment {text}", made()), tokenizer, cfg.rl.max_turns)


def attach(build: Build, loop: Loop, source: PromptSource, held: Sequence[Prompt]) -> None:
    """Gives a loop the steps of a policy on these prompts, and all that goes with them."""
    cfg, context, tokenizer, engine = build.cfg, build.context, build.tokenizer, loop.engine
    settings, geometry = settings_of(cfg, build.layout.dp), build.geometry()
    alone = build.adapts and goes_alone(cfg, build.spec, build.folder)
    sampler = sampler_of(
        cfg, build.folder, context, str(engine.dtype).removeprefix("torch."), rank_of(cfg) if alone else 0
    )
    rounds = Rounds(sync_folder(cfg), "adapter") if alone else None
    generation = Generation(
        engine,
        context.coordinates,
        sampler,
        sampling_of(cfg, tokenizer, build.folder),
        cfg.train.seed,
        talk_of(cfg, tokenizer),
        rounds,
        build.base,
        samples_everywhere(cfg),
    )
    judge = Judge(rewards_of(cfg), weights_of(cfg), lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
    layout = Layout(data.shape_of(tokenizer, geometry), cfg.data.packing is not False, geometry.uniform)
    trained = critic(build, loop.learning_rate, loop.total_steps)
    leaves = frozenset({"optimizer"} if cfg.rl.offload_optimizer else ()) | frozenset(
        {"model"} if cfg.rl.offload_model else ()
    )
    drawing = Drawing(
        source,
        generation,
        settings.group,
        cfg.rl.async_generation,
        cfg.rl.rollout_sleep,
        leaves,
        None if trained is None else trained.engine,
    )
    parts = Parts(drawing, judge, Estimator(cfg, settings, settings.beta), layout, geometry, trained)
    loop.source = rollouts = RolloutSource(settings, parts)
    loop.beside, loop.mark = rollouts.beside, rollouts.mark
    hooks: list[Hook] = [Closing(drawing), Alarms(rollouts)]
    if trained is not None:
        loop.prepare, loop.engines = trained.prepare, {CRITIC: trained.engine}
        # its values, once a generation
        build.rules.append(rule_of(trained.engine, build.spec, 1 / settings.iterations))
        hooks.append(trained)
    if cfg.rl.log_completions:
        hooks.append(Record(build.outputs.completions, rollouts, cfg.rl.num_completions_to_print))
    if cfg.preference.sync_ref_model and settings.beta:
        hooks.append(Reference(cfg.preference.ref_model_sync_steps, cfg.preference.ref_model_mixup_alpha))
    *before, checkpoint = loop.hooks
    if held:
        before.append(RewardEvaluation(build.outputs.evaluation, held, (drawing, judge), cfg.train.eval_steps))
    loop.hooks = [*hooks, *before, checkpoint]
