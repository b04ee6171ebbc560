"""Puts a policy's source together on a rank: sampler, rewards, settings. Owns which part gets which option."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megaswift.config import SwiftConfig
from megaswift.config.byte_size import bytes_text
from megaswift.config.rl_batch import generation_plan
from megaswift.config.rl_defaults import estimator_entry_of
from megaswift.data import build as data
from megaswift.data import vocab_check
from megaswift.data.prompts import Prompt, PromptDataset, PromptSource, prompts_of
from megaswift.data.rollout_batches import RolloutCollator
from megaswift.engine.protocol import Engine
from megaswift.errors import DataError
from megaswift.families.model_source import tokenizer_of
from megaswift.log import count_text
from megaswift.losses.value import ValueLoss
from megaswift.rewards.contract import missing_columns
from megaswift.rollout.sync_folder import SyncRounds
from megaswift.trainers.flops import flop_rule
from megaswift.trainers.hook import Hook
from megaswift.trainers.reference import ReferenceLogprobs
from megaswift.trainers.rl.adapters import merged_because, rank_of, syncs_adapters_only
from megaswift.trainers.rl.advantage_estimator import AdvantageEstimator
from megaswift.trainers.rl.completions_log import CompletionsLog
from megaswift.trainers.rl.critic import Critic, critic_engine
from megaswift.trainers.rl.environment import CheckedEnvironment, environment_class
from megaswift.trainers.rl.evaluation import RewardEvaluation
from megaswift.trainers.rl.generation import Generation
from megaswift.trainers.rl.multi_turn import MultiTurnRollout
from megaswift.trainers.rl.reward_scorer import RewardScorer
from megaswift.trainers.rl.rewards import rewards_of, weights_of
from megaswift.trainers.rl.rollout_monitor import RolloutMonitor
from megaswift.trainers.rl.rollout_source import RolloutDependencies, RolloutSource
from megaswift.trainers.rl.sampler import sampler_of, samples_everywhere, sampling_of, sync_folder
from megaswift.trainers.rl.scheduler import RolloutScheduler
from megaswift.trainers.rl.settings import rl_settings
from megaswift.trainers.summary import SummaryFacts, trained_text

if TYPE_CHECKING:
    from megaswift.trainers.build import RunBuilder
    from megaswift.trainers.loop import Loop

CRITIC = "critic"
"""Within a checkpoint."""
LOOKED_AT = 20_000
"""Prompts whose columns are compared with what rewards need, before training."""
Rate = Callable[[int], float]


def build_prompts(build: RunBuilder) -> tuple[PromptSource, list[Prompt]]:
    """What completions are asked for, and the held-out ones; the tokenizer is the build's from here on."""
    cfg = build.cfg
    build.tokenizer = tokenizer_of(cfg, build.folder)
    plan = generation_plan(cfg, build.layout.dp)
    source, held = prompts_of(cfg, build.tokenizer, plan.prompts, plan.steps)
    vocab_check.check_vocabulary([source.prompts.docs], build.tokenizer, build.spec.vocab_size)
    if problems := missing_columns(rewards_of(cfg), common_columns(source.prompts)):
        raise DataError(problems)
    return source, held or []


def common_columns(prompts: PromptDataset) -> frozenset[str]:
    """Columns that every row has, as far as looked at."""
    return frozenset.intersection(*(frozenset(prompts.read(i).columns) for i in range(min(len(prompts), LOOKED_AT))))


def with_rl_rows(facts: SummaryFacts, build: RunBuilder, source: PromptSource, critic: Engine | None) -> SummaryFacts:
    """The first screen's rows about sampling, rewards and critic; an epoch passes over each prompt once."""
    cfg, plan = build.cfg, generation_plan(build.cfg, build.layout.dp)
    names = (*cfg.rl.reward_funcs, *cfg.rl.reward_model)
    judges = ", ".join(f"{name} x {weight:g}" for name, weight in zip(names, weights_of(cfg), strict=True))
    samplers = build.layout.world_size if samples_everywhere(cfg) else build.layout.dp
    sampling = (
        f"{count_text(plan.generations, 'completion')} each of {count_text(plan.prompts, 'prompt')} at a time, up to "
        f"{cfg.rl.max_completion_length} tokens, by {cfg.rl.rollout_backend} on {count_text(samplers, 'rank')}, "
        f"for {count_text(plan.steps, 'step')}"
    )
    rows = source.rows * plan.generations * plan.iterations
    more = (
        ("sampling", sampling),
        *weight_sync(build),
        ("rewards", judges),
        *(() if critic is None else critic_row(cfg, critic)),
    )
    return replace(facts, rows_per_epoch=rows, more=more)


def weight_sync(build: RunBuilder) -> Iterator[tuple[str, str]]:
    """Of a run with adapters: what its samplers get."""
    if build.adapts:
        cfg, alone = build.cfg, syncs_adapters_only(build.cfg, build.spec, build.folder)
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


class SamplerCloser(Hook):
    """Ends what samples."""

    def __init__(self, drawing: RolloutScheduler) -> None:
        self.drawing = drawing

    def close(self) -> None:
        """The draw under way first."""
        self.drawing.close()
        self.drawing.generation.close()


def build_critic(build: RunBuilder, rate: Rate, total_steps: int) -> Critic | None:
    """The critic of a run that has one."""
    cfg = build.scheduled(total_steps)
    if not estimator_entry_of(cfg).critic:
        return None
    engine = critic_engine(cfg, build.spec, build.folder, build.context, fresh=build.resumed is None)
    share = (cfg.rl.critic_learning_rate or cfg.optim.learning_rate) / cfg.optim.learning_rate
    return Critic(engine, ValueLoss(cfg.rl.cliprange_value, cfg.rl.vf_coef), lambda step: share * rate(step))


def multi_turn_of(cfg: SwiftConfig, tokenizer: Any) -> MultiTurnRollout | None:
    """How conversations go, where the run has an environment."""
    text = cfg.rl.environment
    if text is None:
        return None
    made = environment_class(text)
    return MultiTurnRollout(lambda: CheckedEnvironment(f"--environment {text}", made()), tokenizer, cfg.rl.max_turns)


def attach_rollouts(build: RunBuilder, loop: Loop, source: PromptSource, held: Sequence[Prompt]) -> None:
    """Gives a loop the steps of a policy on these prompts, and all that goes with them."""
    cfg, context, tokenizer, engine = build.cfg, build.context, build.tokenizer, loop.engine
    settings, geometry = rl_settings(cfg, build.layout.dp), build.geometry()
    alone = build.adapts and syncs_adapters_only(cfg, build.spec, build.folder)
    sampler = sampler_of(
        cfg, build.folder, context, str(engine.dtype).removeprefix("torch."), rank_of(cfg) if alone else 0
    )
    rounds = SyncRounds(sync_folder(cfg), "adapter") if alone else None
    generation = Generation(
        engine,
        context.coordinates,
        sampler,
        sampling_of(cfg, tokenizer, build.folder),
        cfg.train.seed,
        multi_turn_of(cfg, tokenizer),
        rounds,
        build.base,
        samples_everywhere(cfg),
    )
    judge = RewardScorer(rewards_of(cfg), weights_of(cfg), lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
    layout = RolloutCollator(data.padding_of(tokenizer, geometry), cfg.data.packing is not False, geometry.uniform)
    trained = build_critic(build, loop.learning_rate, loop.total_steps)
    leaves = frozenset({"optimizer"} if cfg.rl.offload_optimizer else ()) | frozenset(
        {"model"} if cfg.rl.offload_model else ()
    )
    drawing = RolloutScheduler(
        source,
        generation,
        settings.group,
        cfg.rl.async_generation,
        cfg.rl.rollout_sleep,
        leaves,
        None if trained is None else trained.engine,
    )
    parts = RolloutDependencies(
        drawing, judge, AdvantageEstimator(cfg, settings, settings.beta), layout, geometry, trained
    )
    loop.source = rollouts = RolloutSource(settings, parts)
    loop.beside, loop.mark = rollouts.beside, rollouts.mark
    hooks: list[Hook] = [SamplerCloser(drawing), RolloutMonitor(rollouts)]
    if trained is not None:
        loop.prepare, loop.engines = trained.prepare, {CRITIC: trained.engine}
        # its values, once a generation
        build.rules.append(flop_rule(trained.engine, build.spec, 1 / settings.iterations))
        hooks.append(trained)
    if cfg.rl.log_completions:
        hooks.append(CompletionsLog(build.outputs.completions, rollouts, cfg.rl.num_completions_to_print))
    if cfg.preference.sync_ref_model and settings.beta:
        hooks.append(ReferenceLogprobs(cfg.preference.ref_model_sync_steps, cfg.preference.ref_model_mixup_alpha))
    *before, checkpoint = loop.hooks
    if held:
        before.append(RewardEvaluation(build.outputs.evaluation, held, (drawing, judge), cfg.train.eval_steps))
    loop.hooks = [*hooks, *before, checkpoint]
