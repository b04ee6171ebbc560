"""Tasks of reinforcement learning: prompts, sampler, rewards, critic."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megaswift import distributed
from megaswift.base.byte_size import bytes_text
from megaswift.config import SwiftConfig
from megaswift.data import build as data_sources
from megaswift.data import vocabulary
from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.options.agent_templates import AGENT_TEXTS
from megaswift.data.prompts.collate import RolloutCollator
from megaswift.data.prompts.images import PromptImageReader
from megaswift.data.prompts.source import IndexedPrompts, Prompt, PromptSource, load_prompt_splits
from megaswift.data.templates.chosen import thinking_variable
from megaswift.data.vision.batches import media_kinds
from megaswift.data.vision.processor import Processor, tokenizer_of_tokenizer_or_processor
from megaswift.engine.flops import step_flop_formula
from megaswift.engine.protocol import Engine
from megaswift.errors import ConfigError, DataError, Problem
from megaswift.evaluation.training import TrainingTasks
from megaswift.launchers.ray_cluster import LOCAL, ray_address
from megaswift.log import count_text
from megaswift.losses.options.preference import beta_of
from megaswift.losses.value import ValueLoss
from megaswift.models.heads import with_scalar_head
from megaswift.models.spec import ModelSpec
from megaswift.models.vision import has_vision_tower
from megaswift.rewards.functions import load_reward_functions
from megaswift.rewards.options import RewardConfig
from megaswift.rewards.scoring import (
    BuiltInRewardParameters,
    RewardFunction,
    missing_reward_column_problems,
)
from megaswift.rollout.options.placement import ON_CPUS
from megaswift.rollout.sampler import Sampler, SamplerOptions, make_sampler
from megaswift.rollout.sync_folders import SyncRounds
from megaswift.run.checks.adapter_sync import (
    adapter_rank,
    merged_sync_reason,
    syncs_adapters_only,
)
from megaswift.run.checks.prefix_sharing import shares_prefixes
from megaswift.run.engines import RankContext, make_engine
from megaswift.run.model_files import sampled_weights_fingerprint
from megaswift.run.plan import RunPlan
from megaswift.run.ray_roles import build_environment_workers, build_ray_sampler, check_ray_room
from megaswift.run.summary import SummaryFacts, trained_parameter_share_text
from megaswift.run.task import Task, TaskData, TaskParts
from megaswift.run.teacher import build_teacher
from megaswift.trainers.batch_fields import ReferenceLogprobs
from megaswift.trainers.hook import Hook, Rate, interval_of, unchanged
from megaswift.trainers.options.evaluation_checks import evaluates
from megaswift.trainers.rl.adapters import is_adapted
from megaswift.trainers.rl.advantages import AdvantageEstimator
from megaswift.trainers.rl.chat_turns import ChatTurns
from megaswift.trainers.rl.completions_log import CompletionsLog
from megaswift.trainers.rl.critic import CriticTrainer
from megaswift.trainers.rl.draw_queue import DrawQueue
from megaswift.trainers.rl.environment import (
    EnvironmentWithNamedErrors,
    is_agent_class,
    load_environment_class,
    missing_column_problems,
)
from megaswift.trainers.rl.environment_workers import agent_error
from megaswift.trainers.rl.evaluation import RewardEvaluationHook
from megaswift.trainers.rl.generation import CompletionGenerator, is_sampling_rank
from megaswift.trainers.rl.monitor import RolloutMonitor
from megaswift.trainers.rl.multi_turn import MultiTurnRunner, check_endpoint_packages
from megaswift.trainers.rl.options.critic import CriticConfig
from megaswift.trainers.rl.options.derived import (
    advantage_estimator_entry_of,
    advantage_estimator_of,
    corrects_sampler_mismatch,
    interrupts_completions,
    kl_estimator_of,
    kl_in_reward_of,
    max_staleness_of,
    policy_loss_of,
    whitens_advantages,
    writes_draws_side_by_side,
)
from megaswift.trainers.rl.options.generation_batch import generation_batch_plan
from megaswift.trainers.rl.record import RolloutReader, RolloutWriter
from megaswift.trainers.rl.sampler import (
    rollout_batch_size,
    sampling_params_of,
    seeds_requests,
    sync_folder,
    weight_receivers,
)
from megaswift.trainers.rl.scheduler import CompletionSamplingScheduler
from megaswift.trainers.rl.scorer import RewardScorer
from megaswift.trainers.rl.settings import RlSettings
from megaswift.trainers.rl.shared_engine import EngineRanks
from megaswift.trainers.rl.source import RolloutDependencies, RolloutSource, TeacherScores
from megaswift.trainers.schedule import count_steps

CRITIC = "critic"
"""Folder of the critic within a checkpoint."""
LOOKED_AT = 20_000
"""Prompts whose columns are compared with what rewards need, before training."""


@dataclass(frozen=True)
class PolicyTask(Task):
    """A task whose batches are rollouts: completions of prompts, with rewards. PPO adds an engine, the critic."""

    def read(self, plan: RunPlan) -> tuple[RunPlan, TaskData]:
        """Read the prompts to train on, and the held-out ones."""
        cfg = plan.cfg
        reader: Any = plan.reader()
        tokenizer = tokenizer_of_tokenizer_or_processor(reader)
        check_ray_room(cfg)
        environment = check_environment(cfg)
        generation = generation_batch_plan(cfg, plan.layout.dp)
        source, held_out = load_prompt_splits(
            cfg.data,
            cfg.train,
            reader,
            cfg.task,
            cfg.rollout.max_completion_length,
            generation.prompts,
            generation.steps,
        )
        vocabulary.check_dataset_token_ids([source.prompts.docs], tokenizer, plan.geometry().vocabulary)
        functions = reward_functions_of(cfg) if cfg.rollout.replay_rollouts is None else []
        columns = common_columns(source.prompts)
        problems = missing_reward_column_problems(functions, columns)
        if environment is not None:
            problems += missing_column_problems(f"--environment {cfg.rollout.environment}", environment, columns)
        if problems:
            raise DataError(problems)
        processor = reader if isinstance(reader, Processor) else None
        total = count_steps(cfg.train, source)
        check_rollout_files(plan, total, source)
        return plan, TaskData(source, None, held_out or [], tokenizer, processor, total)

    def attach(self, plan: RunPlan, data: TaskData, engine: Engine, rate: Rate) -> TaskParts:
        """Build sampler, critic and rewards."""
        cfg = plan.cfg
        critic_of = partial(build_critic, plan, rate, data.total_steps)
        dependencies = rollout_dependencies(plan, data, engine, critic_of)
        settings = rl_settings(cfg, plan.layout.dp)
        critic = dependencies.critic
        rollouts = RolloutSource(settings, dependencies)
        # A pass of the critic computes the values, once for each generation.
        flops = [] if critic is None else [step_flop_formula(critic.engine, plan.spec, 1 / settings.iterations)]

        def describe(facts: SummaryFacts) -> SummaryFacts:
            return add_rl_summary_rows(facts, plan, data.source, None if critic is None else critic.engine)

        return TaskParts(
            rollouts,
            first_hooks=[*rollout_hooks(plan, rollouts, data.tokenizer)],
            last_hooks=[*reward_evaluation_hooks(plan, rollouts, data.held_out, data.eval_tasks)],
            prepare=unchanged if critic is None else critic.prepare,
            agree_before_batch=True,
            step_extras=rollouts.step_extras,
            mark=rollouts.mark,
            engines={} if critic is None else {CRITIC: critic.engine},
            flops=flops,
            describe=describe,
        )


def check_environment(cfg: SwiftConfig) -> Any:
    """Load the environment's class before the model is built, and return it; None where the run needs none. ConfigError
    where that fails, or where it is an agent that cannot be led there."""
    text = cfg.rollout.environment
    if text is None or cfg.rollout.replay_rollouts is not None:
        return None
    flag = f"--environment {text}"
    apart = cfg.placement.environment_placement == ON_CPUS
    if apart and is_adapted(text):
        rule = "has servers or an endpoint of its own, which Ray does not place"
        raise ConfigError(Problem(flag, rule, "leave out --environment_placement cpu"))
    environment = load_environment_class(text)
    agent = is_agent_class(environment)
    if agent and apart:
        raise agent_error(flag)
    if agent:
        check_endpoint_packages(flag)
    return environment


def common_columns(prompts: IndexedPrompts) -> frozenset[str]:
    """Return the columns that all rows have, of the first `LOOKED_AT` rows."""
    return frozenset.intersection(*(frozenset(prompts.read(i).columns) for i in range(min(len(prompts), LOOKED_AT))))


def add_rl_summary_rows(
    facts: SummaryFacts, plan: RunPlan, source: PromptSource, critic: Engine | None
) -> SummaryFacts:
    """Add the first screen's rows about sampling, rewards and critic; an epoch passes over each prompt once."""
    cfg = plan.cfg
    generation = generation_batch_plan(plan.cfg, plan.layout.dp)
    everywhere = weight_receivers(cfg.rollout.rollout_backend, cfg.placement.sampler_engines) == "all"
    samplers = count_text(plan.layout.world_size if everywhere else plan.layout.dp, "rank")
    if cfg.placement.sampler_engines:
        samplers = f"{count_text(cfg.placement.sampler_engines, 'engine')} on Ray"
    shared = ranks_per_engine(cfg)
    at_once = rollout_batch_size(cfg.rollout, cfg.data.max_length, cfg.model.torch_dtype, plan.spec)
    completions = (
        f"{count_text(generation.generations, 'completion')} for each of {count_text(generation.prompts, 'prompt')} "
        f"at a time"
    )
    sampling = (
        f"{completions}, up to {cfg.rollout.max_completion_length} tokens, "
        f"by {cfg.rollout.rollout_backend} on {samplers}"
        f"{f', {shared} per engine' if shared > 1 else ''}, {at_once} at once, "
        f"for {count_text(generation.steps, 'step')}"
    )
    if cfg.rollout.replay_rollouts is not None:
        sampling = f"{completions}, read from {cfg.rollout.replay_rollouts}, for {count_text(generation.steps, 'step')}"
    rows = source.rows * generation.generations * generation.iterations
    more = (
        ("sampling", sampling),
        *queue_summary_rows(cfg, generation.steps, has_vision_tower(plan.spec.hf_config)),
        *facts.more,
        *weight_sync_summary_rows(plan),
        ("rewards", rewards_text(cfg)),
        *(() if critic is None else critic_summary_row(cfg, critic)),
    )
    return replace(facts, rows_per_epoch=rows, more=more)


def queue_summary_rows(cfg: SwiftConfig, steps: int, images: bool = False) -> Iterator[tuple[str, str]]:
    """Describe how completions are sampled during training, and where they are kept.

    Args:
        cfg: The configuration.
        steps: Optimizer steps on a generation.
        images: Whether prompts may have images.
    """
    rollout = cfg.rollout
    if rollout.replay_rollouts is None and (bound := max_staleness_of(cfg, steps)):
        parts = [f"sampling goes on during training, at most {count_text(bound, 'step')} behind"]
        interrupts = interrupts_completions(cfg, steps, images)
        if interrupts:
            parts.append("new weights interrupt completions")
        elif bound > steps:
            parts.append("new weights wait until all completions are written")
        if rollout.staleness_strategy == "drop":
            parts.append("finished draws come first")
            if interrupts:
                parts.append("those that become too old are dropped")
        yield "queue", "; ".join(parts)
    if rollout.save_rollouts is not None:
        yield "rollouts", f"written to {rollout.save_rollouts}"


def rewards_text(cfg: SwiftConfig) -> str:
    """List the sources of rewards, each with its weight."""
    if cfg.rollout.replay_rollouts is not None and not advantage_estimator_entry_of(cfg).teacher:
        return f"as recorded in {cfg.rollout.replay_rollouts}"
    if advantage_estimator_entry_of(cfg).teacher:
        return f"none: advantages are log-probabilities of {cfg.distillation.teacher_model} less the model's"
    names = (*cfg.rewards.reward_funcs, *cfg.rewards.reward_model)
    weighted = [f"{name} x {weight:g}" for name, weight in zip(names, reward_weights_of(cfg.rewards), strict=True)]
    if cfg.rollout.environment:
        workers = f", in {count_text(cfg.placement.environment_workers, 'actor')} on Ray"
        apart = cfg.placement.environment_placement == ON_CPUS
        weighted.append(f"turns of {cfg.rollout.environment}{workers if apart else ''}")
    return ", ".join(weighted)


def weight_sync_summary_rows(plan: RunPlan) -> Iterator[tuple[str, str]]:
    """Describe the weights that samplers get, for a run with adapters."""
    if not plan.adapts:
        return
    cfg = plan.cfg
    if syncs_adapters_only(cfg, plan.spec, plan.folder):
        yield "weight sync", f"adapters alone, of rank {adapter_rank(cfg.lora)}"
        return
    reason = "rollout_lora is false"
    if cfg.rollout.rollout_lora is None:
        reason = merged_sync_reason(cfg, plan.spec, plan.folder)
    yield "weight sync", f"all weights, adapters merged in: {reason}"


def critic_summary_row(cfg: SwiftConfig, critic: Engine) -> Iterator[tuple[str, str]]:
    """Describe PPO's second model and its cost. Collective."""
    sizes = critic.report()
    start = cfg.critic.critic_model or "the initial model"
    memory = bytes_text(sizes.weight_bytes + sizes.gradient_bytes + sizes.optimizer_bytes)
    rate = cfg.critic.critic_learning_rate or cfg.optim.learning_rate
    yield (
        "critic",
        (
            f"{start}, with a scalar head: {sizes.parameters_total:,} parameters"
            f"{trained_parameter_share_text(sizes)}, {memory} more on the largest rank, learning rate {rate:g}"
        ),
    )


class SamplerCloser(Hook):
    """Closes the samplers when the run ends."""

    def __init__(self, scheduler: CompletionSamplingScheduler) -> None:
        self.scheduler = scheduler

    def close(self) -> None:
        """Close the samplers, after the draw that is under way."""
        self.scheduler.close()
        self.scheduler.generation.close()


def critic_start_folder(critic: CriticConfig, folder: Path) -> Path:
    """Return the folder from which the critic of a run starts; `folder`: the policy's."""
    return folder if critic.critic_model is None else Path(critic.critic_model)


def critic_engine(cfg: SwiftConfig, spec: ModelSpec, folder: Path, context: RankContext, fresh: bool) -> Engine:
    """Build the critic's engine: the policy's model, or `critic_model`, with a scalar head, trained as the policy is.

    A critic with adapters has adapters of its own, and its head trains whole. `fresh` False: a checkpoint brings the
    trained weights. A new head starts near 0, because large initial values would add noise to every advantage until the
    critic has unlearned them.
    """
    scored = with_scalar_head(spec)
    start = critic_start_folder(cfg.critic, folder)
    scored = replace(scored, hf_config={**scored.hf_config}, new_head_std=1 / (1 + scored.hidden_size))
    engine = make_engine(cfg, scored, start, context)
    if fresh or cfg.model.train_type != "full":
        engine.load_hf(start)
    else:
        engine.keep(start)
    return engine


def build_critic(plan: RunPlan, rate: Rate, total_steps: int) -> CriticTrainer | None:
    """Build the critic of a run that has one."""
    cfg = plan.scheduled(total_steps)
    if not advantage_estimator_entry_of(cfg).critic:
        return None
    engine = critic_engine(cfg, plan.spec, plan.folder, plan.context, fresh=plan.resumed is None)
    share = (cfg.critic.critic_learning_rate or cfg.optim.learning_rate) / cfg.optim.learning_rate

    def critic_rate(step: int, total_steps: int) -> float:
        return share * rate(step, total_steps)

    return CriticTrainer(engine, ValueLoss(cfg.critic.cliprange_value, cfg.critic.vf_coef), critic_rate)


def build_multi_turn(cfg: SwiftConfig, tokenizer: Any, context: RankContext | None = None) -> MultiTurnRunner | None:
    """Build the runner of conversations; None for a run without an environment. `context`: the rank, where environments
    may have workers on Ray. Collective then."""
    text = cfg.rollout.environment
    if text is None:
        return None
    make: Callable[[], EnvironmentWithNamedErrors]
    if cfg.placement.environment_placement == ON_CPUS and context is not None:
        make = build_environment_workers(cfg, context)
    else:
        make = partial(EnvironmentWithNamedErrors.make, f"--environment {text}", load_environment_class(text))
    agent_text = cfg.data.agent_template if cfg.data.agent_template in AGENT_TEXTS else ""
    variables = thinking_variable(cfg.data.enable_thinking, tokenizer.chat_template)
    return MultiTurnRunner(
        make,
        ChatTurns(tokenizer, variables, agent_text or ""),
        cfg.rollout.max_turns,
        cfg.data.max_length,
    )


def rl_settings(cfg: SwiftConfig, dp: int) -> RlSettings:
    """Collect the settings of a run on `dp` data-parallel ranks."""
    rl = cfg.rl
    plan = generation_batch_plan(cfg, dp)
    return RlSettings(
        seed=cfg.train.seed,
        group=plan.generations,
        generation=plan.completions,
        slices=plan.batches,
        iterations=plan.iterations,
        temperature=cfg.rollout.temperature,
        reward_weights=cfg.rewards.reward_weights,
        beta=beta_of(cfg),
        estimator=advantage_estimator_of(cfg),
        kl_in_reward=kl_in_reward_of(cfg),
        kl_estimator=kl_estimator_of(cfg),
        whitens=whitens_advantages(cfg),
        mask_truncated=rl.mask_truncated_completions,
        corrects=corrects_sampler_mismatch(cfg),
        tries=1 + rl.max_resample_times if rl.dynamic_sample else 1,
        top_entropy_quantile=rl.top_entropy_quantile,
        use_rollout_logprobs=rl.use_rollout_logprobs,
        loss_type=policy_loss_of(cfg),
        each_reward=rl.multi_objective_aggregation == "normalize_then_sum",
        max_staleness=max_staleness_of(cfg, plan.steps),
    )


def rollout_dependencies(
    plan: RunPlan, data: TaskData, engine: Engine, critic_of: Callable[[], CriticTrainer | None]
) -> RolloutDependencies:
    """Build what makes rollouts: the sampler, the reward functions, the estimator. `critic_of` builds the critic.
    Collective."""
    cfg = plan.cfg
    context = plan.context
    tokenizer = data.tokenizer
    prompts = data.source
    settings = rl_settings(cfg, plan.layout.dp)
    geometry = plan.geometry()

    # How rows are made of prompts and completions.
    images = None
    if data.processor is not None:
        images = PromptImageReader(data.processor, media_kinds(prompts.prompts.docs.stores))
    packs = cfg.data.packing is not False and images is None

    # The sampler, and the weights that it gets; none where the completions are read.
    replays = cfg.rollout.replay_rollouts is not None
    adapters_only = not replays and plan.adapts and syncs_adapters_only(cfg, plan.spec, plan.folder)
    offloaded = {"optimizer": cfg.rollout.offload_optimizer, "model": cfg.rollout.offload_model}
    offloaded_parts = frozenset(part for part, moves in offloaded.items() if moves)
    rank = adapter_rank(cfg.lora) if adapters_only else 0
    generation = CompletionGenerator(
        engine,
        context.coordinates,
        None if replays else build_sampler_in_freed_memory(plan, engine, offloaded_parts, rank),
        sampling_params_of(cfg.rollout, tokenizer, plan.folder),
        cfg.train.seed,
        None if replays else build_multi_turn(cfg, tokenizer, context),
        SyncRounds(sync_folder_of(cfg, plan.folder), "adapter") if adapters_only else None,
        plan.base,
        weight_receivers(cfg.rollout.rollout_backend, cfg.placement.sampler_engines),
        ranks_per_engine(cfg),
        engine_ranks(cfg),
        images,
    )

    # The critic, after the sampler, which reserves its share of the memory first; then the order of both on the device.
    critic = critic_of()
    scheduler = CompletionSamplingScheduler(
        prompts,
        generation,
        settings.draws,
        DrawQueue(
            settings.max_staleness,
            settings.steps,
            interrupts_completions(cfg, settings.steps, images is not None),
            cfg.rollout.staleness_strategy == "drop",
            data.total_steps,
        ),
        advantage_estimator_entry_of(cfg).greedy_baseline,
        cfg.rollout.rollout_sleep,
        offloaded_parts,
        None if critic is None else critic.engine,
        draws_at_once(cfg, settings),
    )
    collator = RolloutCollator(
        data_sources.padding_shape_of(tokenizer, geometry),
        packs,
        geometry.uniform,
        images,
        shares_prefixes(cfg, plan.spec, plan.layout),
    )
    return RolloutDependencies(
        scheduler,
        RewardScorer(
            [] if replays else reward_functions_of(cfg),
            reward_weights_of(cfg.rewards),
            lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        ),
        AdvantageEstimator(cfg.rl, settings, settings.beta),
        collator,
        geometry,
        critic,
        teacher_scores(plan, collator, geometry),
        *rollout_files(plan),
    )


def engine_ranks(cfg: SwiftConfig) -> EngineRanks | None:
    """Make the groups of ranks that share an engine, where they have to agree on what it is asked for. Collective."""
    ranks = ranks_per_engine(cfg)
    leads = cfg.rollout.environment is not None and cfg.rollout.replay_rollouts is None
    return EngineRanks(ranks, cfg.parallel.ddp_timeout) if ranks > 1 and leads else None


def draws_at_once(cfg: SwiftConfig, settings: RlSettings) -> int:
    """Return how many draws may be written at the same time: with servers and engines all that the queue has room for,
    so that the long completions of one draw leave none idle."""
    return settings.max_staleness // settings.steps + 1 if writes_draws_side_by_side(cfg) else 1


def rollout_files(plan: RunPlan) -> tuple[RolloutWriter | None, RolloutReader | None]:
    """Return what saves and what reads generations, where the run does. Collective."""
    rollout = plan.cfg.rollout
    writer = reader = None
    if rollout.save_rollouts is not None:
        saved = Path(rollout.save_rollouts)
        follows = plan.resumed is not None and not plan.cfg.checkpoint.ignore_data_skip
        writer = distributed.run_on_rank0(lambda: RolloutWriter(saved, follows, start_fingerprint(plan)))
    if rollout.replay_rollouts is not None:
        read = Path(rollout.replay_rollouts)
        reader = distributed.run_on_rank0(lambda: RolloutReader(read, start_fingerprint(plan)))
    return writer, reader


def start_fingerprint(plan: RunPlan) -> str | None:
    """Return a fingerprint of the weights that the run starts from; None where it starts from random ones, or goes on
    from a checkpoint."""
    if plan.cfg.model.random_init or plan.resumed is not None:
        return None
    return sampled_weights_fingerprint(plan.folder)


def check_rollout_files(plan: RunPlan, total_steps: int, source: PromptSource) -> None:
    """Check the folders that `rollout_files` names before the model is built. Collective.

    Raises:
        ConfigError: The folder is another run's, or its generations do not fit this run.
        CheckpointError: A recorded generation is damaged.
    """
    _, reader = rollout_files(plan)
    if reader is not None:
        settings = rl_settings(plan.cfg, plan.layout.dp)
        needed = math.ceil(total_steps / settings.steps)

        def prompts_at(places: Sequence[int]) -> list[Prompt]:
            return [prompt for prompt in map(source.at, places) for _ in range(settings.draws)]

        distributed.run_on_rank0(lambda: reader.check(needed, settings.generation, settings.temperature, prompts_at))


def teacher_scores(plan: RunPlan, collator: RolloutCollator, geometry: LoaderGeometry) -> TeacherScores | None:
    """Build the teacher of a run whose advantages compare with one; None for other runs. Collective."""
    if not advantage_estimator_entry_of(plan.cfg).teacher:
        return None
    teacher = build_teacher(plan).teacher
    return lambda completed, needs: teacher.scores(completed, needs, collator, geometry.per_device)


def sampler_options(
    cfg: SwiftConfig, spec: ModelSpec, sync: Path, device: str = "cpu", dtype: str = "auto", rank: int = 0
) -> SamplerOptions:
    """Collect the options of a model's backend. `sync`: the sync folder; `rank`: the rank of adapters that are sent
    alone."""
    rollout = cfg.rollout
    return SamplerOptions(
        dtype=dtype,
        device=device,
        trust_remote_code=cfg.model.trust_remote_code,
        batch_size=rollout_batch_size(rollout, cfg.data.max_length, cfg.model.torch_dtype, spec),
        max_length=cfg.data.max_length,
        memory_share=rollout.vllm_gpu_memory_utilization,
        seed_requests=seeds_requests(
            rollout.rollout_backend,
            cfg.vllm.vllm_seed_requests,
            torch.device(device).type == "cuda",
            cfg.placement.sampler_engines,
        ),
        tensor_parallel_size=cfg.vllm.vllm_tensor_parallel_size,
        engine_arguments=cfg.vllm.engine_arguments | cfg.placement.sglang_arguments,
        base_urls=rollout.rollout_server_url,
        timeout=rollout.rollout_server_timeout,
        sync_folder=sync,
        weight_transport=cfg.vllm.rollout_weight_transport,
        changed_weights_only=cfg.vllm.rollout_changed_weights_only,
        lora_rank=rank,
    )


def build_sampler(
    cfg: SwiftConfig, spec: ModelSpec, folder: Path, context: RankContext, dtype: str, rank: int
) -> Sampler | None:
    """Build this rank's sampler; None if another rank of the replica has it. Collective."""
    options = sampler_options(cfg, spec, sync_folder_of(cfg, folder), str(context.device), dtype, rank)
    if cfg.placement.sampler_engines:
        return build_ray_sampler(cfg, folder, options, context)
    if weight_receivers(cfg.rollout.rollout_backend) != "all" and not is_sampling_rank(context.coordinates):
        return None
    if not options.seed_requests:
        # Engines may share the completions of a prompt, which would be equal if the engines had one seed. Ranks of one
        # engine draw the same tokens.
        options = replace(options, seed=cfg.train.seed + context.rank // options.tensor_parallel_size)
    return make_sampler(cfg.rollout.rollout_backend, folder, options)


def sync_folder_of(cfg: SwiftConfig, folder: Path) -> Path:
    """Return the folder of new weights for the samplers of a run."""
    elsewhere = bool(cfg.placement.sampler_engines) and ray_address(cfg.launch, os.environ) != LOCAL
    return sync_folder(cfg.rollout, Path(cfg.checkpoint.output_dir), folder, elsewhere)


def ranks_per_engine(cfg: SwiftConfig) -> int:
    """Return how many ranks share an engine in their processes."""
    return 1 if cfg.placement.sampler_engines else cfg.vllm.vllm_tensor_parallel_size


def build_sampler_in_freed_memory(
    plan: RunPlan, engine: Engine, offloaded_parts: frozenset[str], rank: int
) -> Sampler | None:
    """Build this rank's sampler while `offloaded_parts` of the engine are off the device: vLLM refuses to start if less
    than its share of the memory is free. `rank`: the rank of adapters that are sent alone; 0: all weights are sent."""
    if offloaded_parts:
        engine.offload(offloaded_parts)
    dtype = str(engine.dtype).removeprefix("torch.")
    sampler = build_sampler(plan.cfg, plan.spec, plan.folder, plan.context, dtype, rank)
    if offloaded_parts:
        engine.onload()
    return sampler


def rollout_hooks(plan: RunPlan, rollouts: RolloutSource, tokenizer: Any) -> Iterator[Hook]:
    """Build the hooks of a policy's run that come before those of every run."""
    cfg = plan.cfg
    parts = rollouts.parts
    yield SamplerCloser(parts.scheduler)
    yield RolloutMonitor(rollouts)
    if parts.critic is not None:
        yield parts.critic
    if cfg.rl.log_completions:
        most = cfg.rl.num_completions_to_print
        with_tokens = cfg.rl.num_completions_with_tokens
        yield CompletionsLog(plan.outputs.completions, rollouts, most, with_tokens, tokenizer)
    if cfg.preference.sync_ref_model and rollouts.settings.beta:
        yield ReferenceLogprobs(cfg.preference.ref_model_sync_steps, cfg.preference.ref_model_mixup_alpha)


def reward_evaluation_hooks(
    plan: RunPlan, rollouts: RolloutSource, held_out: Sequence[Prompt], tasks: TrainingTasks | None
) -> Iterator[Hook]:
    """Build the evaluation on held-out prompts, where there are any."""
    if held_out and evaluates(plan.cfg):
        work = (rollouts.parts.scheduler, rollouts.parts.scorer)
        options = plan.cfg.evaluation
        every = interval_of(options.eval_strategy, options.eval_steps)
        yield RewardEvaluationHook(plan.outputs.evaluation, held_out, work, every, tasks)


def reward_functions_of(cfg: SwiftConfig) -> list[RewardFunction]:
    """Load the reward functions in the order of `reward_weights`; ConfigError with all that is wrong."""
    rewards = cfg.rewards
    functions = load_reward_functions(
        rewards.reward_funcs,
        BuiltInRewardParameters(**{f.name: cfg.value(f.name) for f in fields(BuiltInRewardParameters)}),
        cfg.train.external_plugins,
    )
    if not rewards.reward_model:
        return functions
    from megaswift.inference.options.commands import ModelLoadingOptions
    from megaswift.rewards.reward_model import load_reward_models  # loads transformers

    options = ModelLoadingOptions(trust_remote_code=cfg.model.trust_remote_code)
    return [*functions, *load_reward_models(rewards.reward_model, options, {f.name for f in functions})]


def reward_weights_of(rewards: RewardConfig) -> list[float]:
    """Return a weight for each reward."""
    return [*rewards.reward_weights] or [1.0] * (len(rewards.reward_funcs) + len(rewards.reward_model))
