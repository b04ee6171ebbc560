"""Builds the loop of reinforcement learning on a rank: prompts, sampler, rewards, critic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megaswift.config import SwiftConfig
from megaswift.config.agent_templates import AGENT_TEXTS
from megaswift.config.byte_size_text import bytes_text
from megaswift.config.evaluation_rules import evaluates
from megaswift.config.generation_batch import generation_batch_plan
from megaswift.config.rl_defaults import advantage_estimator_entry_of
from megaswift.data import build_batch_sources as data
from megaswift.data import vocab_check
from megaswift.data.collate_rollout_batches import RolloutCollator
from megaswift.data.prompt_images import PromptImageReader
from megaswift.data.read_template_and_system import thinking_variable
from megaswift.data.rl_prompts import IndexedPrompts, Prompt, PromptSource, load_prompt_splits
from megaswift.data.vision_batches import media_kinds
from megaswift.data.vision_processor import tokenizer_of_tokenizer_or_processor
from megaswift.engine.protocol import Engine
from megaswift.errors import DataError
from megaswift.log import count_text
from megaswift.losses.value import ValueLoss
from megaswift.rewards.load_built_in_and_user_reward_functions import load_reward_functions
from megaswift.rewards.reward_interface_and_scoring import (
    BuiltInRewardParameters,
    RewardFunction,
    missing_reward_column_problems,
)
from megaswift.rollout.sampler import Sampler
from megaswift.rollout.write_weight_sync_folders import SyncRounds
from megaswift.trainers.add_preference_loss_fields_to_batches import ReferenceLogprobs
from megaswift.trainers.choose_prefix_sharing import shares_prefixes
from megaswift.trainers.flops import step_flop_formula
from megaswift.trainers.hook import Hook
from megaswift.trainers.learning_rate_schedule import check_schedule_length, count_steps, lr_at, weight_decay_at
from megaswift.trainers.loop import Loop, unchanged
from megaswift.trainers.reduce_lr_on_plateau import allowed_rate
from megaswift.trainers.rl.advantage_estimator import AdvantageEstimator
from megaswift.trainers.rl.build_sampler import (
    build_sampler,
    rollout_batch_size,
    samples_on_every_rank,
    sampling_params_of,
    sync_folder,
)
from megaswift.trainers.rl.chat_turns import ChatTurns
from megaswift.trainers.rl.choose_adapter_or_merged_weight_sync import (
    adapter_rank,
    merged_sync_reason,
    syncs_adapters_only,
)
from megaswift.trainers.rl.completion_generation_and_weight_sync import CompletionGenerator
from megaswift.trainers.rl.completions_log import CompletionsLog
from megaswift.trainers.rl.critic import CriticTrainer, critic_engine
from megaswift.trainers.rl.environment import EnvironmentWithNamedErrors, load_environment_class
from megaswift.trainers.rl.multi_turn import MultiTurnRunner
from megaswift.trainers.rl.offload_and_async_generation import CompletionSamplingScheduler
from megaswift.trainers.rl.reward_evaluation import RewardEvaluationHook
from megaswift.trainers.rl.reward_scorer import RewardScorer
from megaswift.trainers.rl.rollout_monitor import RolloutMonitor
from megaswift.trainers.rl.rollout_source import RolloutDependencies, RolloutSource
from megaswift.trainers.rl.settings import rl_settings
from megaswift.trainers.startup_summary import SummaryFacts, trained_parameter_share_text
from megaswift.trainers.step_interval import interval_of
from megaswift.trainers.supervised_loop_builder import LoopWithRunSummary
from megaswift.trainers.wall_time_by_part import StepTimer, timed

if TYPE_CHECKING:
    from megaswift.trainers.run_builder import RunBuilder
    from megaswift.trainers.session import TrainingSession

CRITIC = "critic"
"""Within a checkpoint."""
LOOKED_AT = 20_000
"""Prompts whose columns are compared with what rewards need, before training."""
Rate = Callable[[int], float]


def build_training_and_held_out_prompts(build: RunBuilder) -> tuple[PromptSource, list[Prompt]]:
    """What completions are asked for, and the held-out ones; the tokenizer is the build's from here on."""
    cfg = build.cfg
    reader: Any = build.reader()
    build.tokenizer = tokenizer_of_tokenizer_or_processor(reader)
    plan = generation_batch_plan(cfg, build.layout.dp)
    source, held_out = load_prompt_splits(cfg, reader, plan.prompts, plan.steps)
    vocab_check.check_dataset_token_ids([source.prompts.docs], build.tokenizer, build.geometry().vocabulary)
    if problems := missing_reward_column_problems(reward_functions_of(cfg), common_columns(source.prompts)):
        raise DataError(problems)
    return source, held_out or []


def common_columns(prompts: IndexedPrompts) -> frozenset[str]:
    """Columns that every row has, as far as looked at."""
    return frozenset.intersection(*(frozenset(prompts.read(i).columns) for i in range(min(len(prompts), LOOKED_AT))))


def add_rl_summary_rows(
    facts: SummaryFacts, build: RunBuilder, source: PromptSource, critic: Engine | None
) -> SummaryFacts:
    """The first screen's rows about sampling, rewards and critic; an epoch passes over each prompt once."""
    cfg, plan = build.cfg, generation_batch_plan(build.cfg, build.layout.dp)
    samplers = build.layout.world_size if samples_on_every_rank(cfg) else build.layout.dp
    shared = cfg.vllm.vllm_tensor_parallel_size
    sampling = (
        f"{count_text(plan.generations, 'completion')} for each of {count_text(plan.prompts, 'prompt')} at a time, "
        "up to "
        f"{cfg.rl.max_completion_length} tokens, by {cfg.rl.rollout_backend} on {count_text(samplers, 'rank')}"
        f"{f', {shared} per engine' if shared > 1 else ''}, {rollout_batch_size(cfg, build.spec)} at once, "
        f"for {count_text(plan.steps, 'step')}"
    )
    rows = source.rows * plan.generations * plan.iterations
    more = (
        ("sampling", sampling),
        *facts.more,
        *weight_sync_summary_rows(build),
        ("rewards", rewards_text(cfg)),
        *(() if critic is None else critic_summary_row(cfg, critic)),
    )
    return replace(facts, rows_per_epoch=rows, more=more)


def rewards_text(cfg: SwiftConfig) -> str:
    """What gives rewards, each with its weight."""
    names = (*cfg.rl.reward_funcs, *cfg.rl.reward_model)
    weighted = [f"{name} x {weight:g}" for name, weight in zip(names, reward_weights_of(cfg), strict=True)]
    return ", ".join([*weighted, *([f"turns of {cfg.rl.environment}"] if cfg.rl.environment else [])])


def weight_sync_summary_rows(build: RunBuilder) -> Iterator[tuple[str, str]]:
    """Of a run with adapters: what its samplers get."""
    if build.adapts:
        cfg, alone = build.cfg, syncs_adapters_only(build.cfg, build.spec, build.folder)
        why = (
            merged_sync_reason(cfg, build.spec, build.folder)
            if cfg.rl.rollout_lora is None
            else "rollout_lora is false"
        )
        yield (
            "weight sync",
            f"adapters alone, of rank {adapter_rank(cfg)}" if alone else f"all weights, adapters merged in: {why}",
        )


def critic_summary_row(cfg: SwiftConfig, critic: Engine) -> Iterator[tuple[str, str]]:
    """What PPO's second model is and costs. Collective."""
    sizes, start = critic.report(), cfg.rl.critic_model or "the initial model"
    memory = bytes_text(sizes.weight_bytes + sizes.gradient_bytes + sizes.optimizer_bytes)
    rate = cfg.rl.critic_learning_rate or cfg.optim.learning_rate
    yield (
        "critic",
        (
            f"{start}, with a scalar head: {sizes.parameters_total:,} parameters"
            f"{trained_parameter_share_text(sizes)}, {memory} more on the largest rank, learning rate {rate:g}"
        ),
    )


class SamplerCloser(Hook):
    """Ends what samples."""

    def __init__(self, scheduler: CompletionSamplingScheduler) -> None:
        self.scheduler = scheduler

    def close(self) -> None:
        """The draw under way first."""
        self.scheduler.close()
        self.scheduler.generation.close()


def build_critic(build: RunBuilder, rate: Rate, total_steps: int) -> CriticTrainer | None:
    """The critic of a run that has one."""
    cfg = build.scheduled(total_steps)
    if not advantage_estimator_entry_of(cfg).critic:
        return None
    engine = critic_engine(cfg, build.spec, build.folder, build.context, fresh=build.resumed is None)
    share = (cfg.rl.critic_learning_rate or cfg.optim.learning_rate) / cfg.optim.learning_rate
    return CriticTrainer(engine, ValueLoss(cfg.rl.cliprange_value, cfg.rl.vf_coef), lambda step: share * rate(step))


def build_multi_turn(cfg: SwiftConfig, tokenizer: Any) -> MultiTurnRunner | None:
    """How conversations go, where the run has an environment."""
    text = cfg.rl.environment
    if text is None:
        return None
    environment = load_environment_class(text)
    agent_text = cfg.data.agent_template if cfg.data.agent_template in AGENT_TEXTS else ""
    variables = thinking_variable(cfg.data.enable_thinking, tokenizer.chat_template)
    return MultiTurnRunner(
        lambda: EnvironmentWithNamedErrors.make(f"--environment {text}", environment),
        ChatTurns(tokenizer, variables, agent_text or ""),
        cfg.rl.max_turns,
        cfg.data.max_length,
    )


def build_rollout_loop(session: TrainingSession) -> LoopWithRunSummary:
    """The loop of a policy: its batches are rollouts, its other engine is the critic. Prompts first: a malformed row
    stops the run before a model is built."""
    cfg, build = session.cfg, session.build
    with timed(session.seconds, "data"):
        prompts, held_out = build_training_and_held_out_prompts(build)
        total = count_steps(cfg, prompts)
    check_schedule_length(total, cfg.optim)

    def rate(step: int) -> float:
        # a resumed run may have another number of steps
        return allowed_rate(lr_at(step, loop.total_steps, cfg.optim), logging)

    with timed(session.seconds, "model"), session.memory_advice():
        engine = build.engine(fresh=build.resumed is None, total_steps=total)
        *logging, checkpoint = build.hooks(engine, None)
        dependencies = rollout_dependencies(build, engine, prompts, partial(build_critic, build, rate, total))
    settings, critic = rl_settings(cfg, build.layout.dp), dependencies.critic
    if critic is not None:
        # its values, once a generation
        build.rules.append(step_flop_formula(critic.engine, build.spec, 1 / settings.iterations))
    rollouts = RolloutSource(settings, dependencies)
    loop = Loop(
        engine,
        rollouts,
        build.task.loss(cfg),
        rate,
        total,
        [
            StepTimer(),
            *rollout_hooks(build, rollouts),
            *logging,
            *reward_evaluation_hooks(build, rollouts, held_out),
            checkpoint,
        ],
        unchanged if critic is None else critic.prepare,
        agree_before_batch=True,
        step_extras=rollouts.step_extras,
        mark=rollouts.mark,
        engines={} if critic is None else {CRITIC: critic.engine},
        seconds=session.seconds,
        weight_decay=lambda step: weight_decay_at(step, loop.total_steps, cfg.optim),
    )

    def facts() -> SummaryFacts:
        plain = build.facts(engine, prompts, None, loop.total_steps, loop.step)
        return add_rl_summary_rows(plain, build, prompts, loop.engines.get(CRITIC))

    return LoopWithRunSummary(loop, facts)


def rollout_dependencies(
    build: RunBuilder, engine: Engine, prompts: PromptSource, critic_of: Callable[[], CriticTrainer | None]
) -> RolloutDependencies:
    """What rollouts are made by: the sampler, the reward functions, the estimator."""
    cfg, context, tokenizer = build.cfg, build.context, build.tokenizer
    settings, geometry = rl_settings(cfg, build.layout.dp), build.geometry()
    images = None
    if build.processor is not None:
        images = PromptImageReader(build.processor, media_kinds(prompts.prompts.docs.stores))
    packs = cfg.data.packing is not False and images is None
    adapters_only = build.adapts and syncs_adapters_only(cfg, build.spec, build.folder)
    offloaded = {"optimizer": cfg.rl.offload_optimizer, "model": cfg.rl.offload_model}
    leaves = frozenset(part for part, moves in offloaded.items() if moves)
    generation = CompletionGenerator(
        engine,
        context.coordinates,
        build_sampler_in_freed_memory(build, engine, leaves, adapter_rank(cfg) if adapters_only else 0),
        sampling_params_of(cfg, tokenizer, build.folder),
        cfg.train.seed,
        build_multi_turn(cfg, tokenizer),
        SyncRounds(sync_folder(cfg, build.folder), "adapter") if adapters_only else None,
        build.base,
        samples_on_every_rank(cfg),
        cfg.vllm.vllm_tensor_parallel_size,
        images,
    )
    critic = critic_of()  # after the sampler, which reserves its share of the memory first
    scheduler = CompletionSamplingScheduler(
        prompts,
        generation,
        settings.draws,
        advantage_estimator_entry_of(cfg).greedy_baseline,
        cfg.rl.async_generation,
        cfg.rl.rollout_sleep,
        leaves,
        None if critic is None else critic.engine,
    )
    return RolloutDependencies(
        scheduler,
        RewardScorer(
            reward_functions_of(cfg),
            reward_weights_of(cfg),
            lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        ),
        AdvantageEstimator(cfg, settings, settings.beta),
        RolloutCollator(
            data.padding_shape_of(tokenizer, geometry),
            packs,
            geometry.uniform,
            images,
            shares_prefixes(cfg, build.spec, build.layout),
        ),
        geometry,
        critic,
    )


def build_sampler_in_freed_memory(
    build: RunBuilder, engine: Engine, leaves: frozenset[str], rank: int
) -> Sampler | None:
    """This rank's sampler, built while `leaves` of the engine are off the device: vLLM refuses to start where less than
    its share of the memory is free. `rank`: of adapters that come alone."""
    if leaves:
        engine.offload(leaves)
    dtype = str(engine.dtype).removeprefix("torch.")
    sampler = build_sampler(build.cfg, build.spec, build.folder, build.context, dtype, rank)
    if leaves:
        engine.onload()
    return sampler


def rollout_hooks(build: RunBuilder, rollouts: RolloutSource) -> Iterator[Hook]:
    """The hooks of a policy's run that come before those of every run."""
    cfg, parts = build.cfg, rollouts.parts
    yield SamplerCloser(parts.scheduler)
    yield RolloutMonitor(rollouts)
    if parts.critic is not None:
        yield parts.critic
    if cfg.rl.log_completions:
        yield CompletionsLog(build.outputs.completions, rollouts, cfg.rl.num_completions_to_print)
    if cfg.preference.sync_ref_model and rollouts.settings.beta:
        yield ReferenceLogprobs(cfg.preference.ref_model_sync_steps, cfg.preference.ref_model_mixup_alpha)


def reward_evaluation_hooks(build: RunBuilder, rollouts: RolloutSource, held_out: Sequence[Prompt]) -> Iterator[Hook]:
    """Evaluation on the held-out prompts, where there are any."""
    if held_out and evaluates(build.cfg):
        work, train = (rollouts.parts.scheduler, rollouts.parts.scorer), build.cfg.train
        every = interval_of(train.eval_strategy, train.eval_steps)
        yield RewardEvaluationHook(build.outputs.evaluation, held_out, work, every)


def reward_functions_of(cfg: SwiftConfig) -> list[RewardFunction]:
    """In the order of `reward_weights`; ConfigError with all that is wrong."""
    rl = cfg.rl
    functions = load_reward_functions(
        rl.reward_funcs,
        BuiltInRewardParameters(**{f.name: getattr(rl, f.name) for f in fields(BuiltInRewardParameters)}),
        cfg.train.external_plugins,
    )
    if not rl.reward_model:
        return functions
    from megaswift.config.inference import ModelLoadingOptions
    from megaswift.rewards.reward_model import load_reward_models  # loads transformers

    options = ModelLoadingOptions(trust_remote_code=cfg.model.trust_remote_code)
    return [*functions, *load_reward_models(rl.reward_model, options, {f.name for f in functions})]


def reward_weights_of(cfg: SwiftConfig) -> list[float]:
    """One for each reward."""
    rl = cfg.rl
    return [*rl.reward_weights] or [1.0] * (len(rl.reward_funcs) + len(rl.reward_model))
