"""Builds a run on a rank: process groups, agreement of the ranks, data, engine, hooks.

The functions stand in the order in which they run. `training.py` calls the first two stages, `course.py` the third.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megaswift import distributed, log
from megaswift.bridge.adapters.initial import write_initial_adapter
from megaswift.bridge.adapters.options.checks import has_other_initial_weights
from megaswift.bridge.hf.base_model import write_changed_model_folder
from megaswift.config import SwiftConfig
from megaswift.data.batches.loader import EvaluationSource
from megaswift.engine.flops import peak_tflops, step_flop_formula
from megaswift.engine.options.engine_checks import NATIVE
from megaswift.engine.options.optimizer_checks import can_shard_optimizer
from megaswift.engine.protocol import Engine, EngineSizeReport
from megaswift.evaluation.training import TaskSettings, TrainingTasks
from megaswift.folders.checkpoint import shown_model_folder
from megaswift.folders.source import locate_model
from megaswift.losses.options.preference import needs_reference
from megaswift.memory.objective import forward_passes_before_step
from megaswift.models.family import read_config_json
from megaswift.models.flops import StepFlopFormula
from megaswift.models.spec import ModelSpec
from megaswift.options.tasks import CLASSIFIERS, PPO, RL
from megaswift.parallel.checks import legal_layout
from megaswift.parallel.constraints import LayoutRequest
from megaswift.parallel.grid import rank_grid_text
from megaswift.parallel.layout import Layout
from megaswift.parallel.model_shape import ModelShape
from megaswift.parallel.pipeline_split import PipelineSplit
from megaswift.run.checks import changed_model
from megaswift.run.checks.fit import fit_to_device
from megaswift.run.checks.model_spec import model_spec_for_task
from megaswift.run.checks.prefix_sharing import prefix_sharing_rows
from megaswift.run.checks.ranks import (
    program_and_device_facts,
    refuse_ranks_that_differ,
    refuse_ranks_with_other_options,
    refuse_unshared_output_folder,
)
from megaswift.run.checks.sources import verify_sources_and_locate_model
from megaswift.run.engines import RankContext, make_engine, start_context
from megaswift.run.faults.oom_retry import config_of_retry, forget_earlier_retry
from megaswift.run.faults.options import FaultToleranceConfig
from megaswift.run.lock import RunLock
from megaswift.run.model_files import REFERENCE, TEMPLATE, ModelFiles, sampled_weights_fingerprint
from megaswift.run.output import prepare_output_folder
from megaswift.run.output_version import (
    config_of_new_version,
    config_of_started_version,
    names_of_all_ranks,
    run_names,
)
from megaswift.run.plan import RunPlan
from megaswift.run.policy_task import critic_start_folder, rl_settings
from megaswift.run.saved_paths import with_absolute_paths
from megaswift.run.summary import SummaryFacts, data_text
from megaswift.run.task import Task, TaskData
from megaswift.run.tasks import TASKS
from megaswift.trainers.batch_fields import batch_logprobs
from megaswift.trainers.hook import PLUGIN_HOOKS, Hook, Rate, Run, interval_of, timed
from megaswift.trainers.hooks.best_model import best_model_hook
from megaswift.trainers.hooks.checkpoint import CheckpointHook, TimedSaves
from megaswift.trainers.hooks.evaluation import EvaluationHook
from megaswift.trainers.hooks.gpu_health import GpuHealthHook
from megaswift.trainers.hooks.metrics import MetricsJsonlHook, ThroughputFormula
from megaswift.trainers.hooks.plateau import lowered_rate, plateau_hook
from megaswift.trainers.hooks.preemption import PreemptionNoticeHook
from megaswift.trainers.hooks.profiler import StepProfilerHook
from megaswift.trainers.hooks.progress import Progress
from megaswift.trainers.hooks.replicas import ReplicaCheckHook
from megaswift.trainers.hooks.step_monitor import SkippedStepAndLossSpikeMonitor
from megaswift.trainers.hooks.straggler import StragglerHook
from megaswift.trainers.hooks.trackers import TrackedRun, tracker_hooks
from megaswift.trainers.hub_upload import HubUpload
from megaswift.trainers.loop import StepTimer
from megaswift.trainers.options.batch_sizes import batch_plan
from megaswift.trainers.options.checkpoint import saves_by_time
from megaswift.trainers.options.evaluation_checks import best_model_metric, compares_evaluations, evaluates
from megaswift.trainers.options.schedule import PLATEAU
from megaswift.trainers.reference_logprobs import (
    PrecomputedReferenceLogprobs,
    compute_reference_logprobs,
)
from megaswift.trainers.schedule import check_schedule_length, lr_at, weight_decay_at
from megaswift.trainers.user_hook import make_user_hooks

SHAPE = (
    "family",
    "num_layers",
    "hidden_size",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn",
    "vocab_size",
    "tied",
    "experts",
    "topk",
    "expert_ffn",
)
"""Fields of `ModelSpec` that must be the same in a checkpoint and in the model that it is loaded into."""


# ---------------------------------------------------------------------------------------------------------------------
# 1. Process groups
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Processes:
    """The process groups that a run has joined, and the model for which they are laid out."""

    folder: Path
    """The model's Hugging Face folder."""
    spec: ModelSpec
    layout: Layout
    context: RankContext


def join_processes(cfg: SwiftConfig) -> Processes:
    """Read the model's configuration, and join the process groups of the layout for it."""
    folder = locate_model(cfg.model, weights=not cfg.model.random_init, verify=False)
    spec = model_spec_for_task(cfg, folder)
    started = int(os.environ.get("WORLD_SIZE", "1"))
    request = LayoutRequest.of(cfg.parallel, started, cfg.data.max_length, cfg.train)
    layout = legal_layout(ModelShape.of(spec), request)
    return Processes(folder, spec, layout, start_context(cfg, layout))


# ---------------------------------------------------------------------------------------------------------------------
# 2. What all ranks agree on before data and model are read
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SettledRun:
    """A run whose options, files and output folder are settled."""

    cfg: SwiftConfig
    """The configuration that the report shows. `plan.cfg` also names the initial adapter that the run has made."""
    plan: RunPlan
    lock: RunLock
    """The lock of the output folder; `course.py` releases it."""
    upload: HubUpload | None


def settle(cfg: SwiftConfig, processes: Processes) -> SettledRun:
    """Agree on the configuration, check the files that the run reads, and open the output folder. Collective."""
    layout = processes.layout

    # Which attempt of which run this is.
    names = names_of_all_ranks(run_names(cfg, os.environ))
    cfg = config_of_started_version(cfg, names, os.environ)
    cfg = config_of_retry(cfg, layout.dp, os.environ)

    # Programs, devices, options and model files are the same on all ranks, and the files are complete.
    if layout.world_size > 1:
        refuse_ranks_that_differ(program_and_device_facts(processes.folder, processes.context.device))
    refuse_ranks_with_other_options(cfg)
    folder = verify_sources_and_locate_model(cfg, processes.folder)
    spec = processes.spec if folder == processes.folder else model_spec_for_task(cfg, folder)

    # Settings that fit the devices.
    cfg, fit = fit_to_device(cfg, spec, layout)

    # The output folder, which all nodes see.
    cfg = config_of_new_version(cfg)
    lock = RunLock(Path(cfg.checkpoint.output_dir))
    outputs = distributed.run_on_rank0(lambda: prepare_output_folder(cfg, lock, names))
    refuse_unshared_output_folder(outputs.config)
    if distributed.global_rank() == 0:
        forget_earlier_retry(cfg, outputs.root, os.environ)

    # The model to start from, if the options change it: new tokens, or initial adapters.
    folder = base_model_folder(cfg, folder, outputs.root)
    adapted, folder = with_initial_adapter(cfg, folder, outputs.root)
    plan = RunPlan(adapted, spec, folder, processes.context, outputs, fit)
    upload = HubUpload(cfg.hub, cfg.checkpoint.output_dir, cfg.model.use_hf) if cfg.hub.push_to_hub else None
    return SettledRun(cfg, plan, lock, upload)


def base_model_folder(cfg: SwiftConfig, folder: Path, output: Path) -> Path:
    """Return the folder from which the run starts: `folder`, or OUT/base_model, which rank 0 makes. Collective."""
    if not changed_model.changes_model(cfg.model):
        return folder

    def write() -> Path:
        config, tokenizer = changed_model.changed_config_and_tokenizer(cfg, folder)
        new_rows = config.get("vocab_size", 0) - read_config_json(folder).get("vocab_size", 0)
        if new_rows:
            log.info(
                f"new_special_tokens: {log.count_text(new_rows, 'new row')} in the embedding, each the mean of the old"
            )
        weights = not cfg.model.random_init
        return write_changed_model_folder(folder, output / changed_model.BASE, config, tokenizer, weights)

    return distributed.run_on_rank0(write, hours=24)


def with_initial_adapter(cfg: SwiftConfig, folder: Path, output: Path) -> tuple[SwiftConfig, Path]:
    """Write OUT/initial_adapter on rank 0 if `--init_weights` asks for it. Collective.

    Returns:
        The configuration of a run that starts from the adapter, and the folder of the base model to which it belongs.
    """
    if not has_other_initial_weights(cfg):
        return cfg, folder
    adapter = output / changed_model.ADAPTER
    residual = output / changed_model.RESIDUAL
    seed = cfg.train.seed
    native = cfg.engine.engine == NATIVE
    base = distributed.run_on_rank0(
        lambda: write_initial_adapter(cfg.lora, seed, native, folder, adapter, residual), hours=24
    )
    return cfg.with_adapter_folder(str(adapter)), base


# ---------------------------------------------------------------------------------------------------------------------
# 3. The run
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BuiltRun:
    """A run that is ready to be restored and trained."""

    run: Run
    files: ModelFiles
    model_facts: Mapping[str, Any]
    """Facts about the model that must be the same when a checkpoint is resumed."""
    saved_config: Mapping[str, Any]
    """The configuration as it is written to a checkpoint."""
    facts: Callable[[], SummaryFacts]
    """Returns the facts of the first screen, once the run stands at its first step. Collective."""


def build_run(
    plan: RunPlan, seconds: dict[str, float], memory_advice: Callable[[], AbstractContextManager[None]]
) -> BuiltRun:
    """Build the parts of a run in order: data, engine, hooks, what the task adds to them, loss. Collective.

    Args:
        plan: What the ranks have agreed on.
        seconds: Wall time by part of the run, to which this adds.
        memory_advice: A context that explains an out-of-memory error of the engine.

    Returns:
        The run at its first step, the writer of the model's files, and the facts of the first screen.

    Raises:
        UserError: The data are malformed or too short, or the device has too little memory.
    """
    task = TASKS.get(plan.cfg.task)

    # Data first: a malformed row stops the run before a model is built.
    with timed(seconds, "data"):
        plan, data = task.read(plan)
        data = replace(data, eval_tasks=load_eval_tasks(plan, data.tokenizer))
    schedule = plan.cfg.schedule
    check_schedule_length(data.total_steps, schedule)

    # The schedule. With the plateau schedule, evaluations lower the rate.
    peak = plan.cfg.optim.learning_rate
    learning_rate: Rate = partial(lr_at, schedule=schedule, peak=peak)
    plateau = None
    if schedule.lr_scheduler_type == PLATEAU:
        plateau = plateau_hook(schedule, peak, best_model_metric(plan.cfg), plan.cfg.evaluation.greater_is_better)
        learning_rate = partial(lowered_rate, learning_rate, plateau)

    with timed(seconds, "model"), memory_advice():
        # The engine: the model, with its weights.
        engine = make_engine(plan.scheduled(data.total_steps), plan.spec, plan.folder, plan.context)
        if needs_reference(plan.cfg):
            data = replace(data, reference=start_from_reference(plan, engine, data.every_row_once))
        else:
            load_start_weights(plan, engine)

        # The hooks that every run has. `MetricsJsonlHook` keeps the list `flops`, which grows below.
        flops = [step_flop_formula(engine, plan.spec, forward_pass_count_before_step(plan.cfg, plan.layout.dp))]
        files = model_files(plan, engine, data.tokenizer, task)
        facts = model_facts(plan)
        *hooks, checkpoint = run_hooks(plan, task, engine, files, data, plateau, flops, facts)

        # The task's parts: a critic and a sampler, what the loss reads besides the rows, and their hooks.
        parts = task.attach(plan, data, engine, learning_rate)
        flops += parts.flops

    # The loss, and the run as a whole. The timer comes first and the checkpoint last.
    run = Run(
        engine,
        parts.data,
        data.loss or task.loss(plan.cfg),
        learning_rate,
        data.total_steps,
        [StepTimer(), *parts.first_hooks, *hooks, *parts.last_hooks, checkpoint],
        parts.prepare,
        prepare_before_counts=parts.prepare_before_counts,
        agree_before_batch=parts.agree_before_batch,
        step_extras=parts.step_extras,
        mark=parts.mark,
        engines=parts.engines,
        weight_decay=partial(weight_decay_at, schedule=schedule),
        seconds=seconds,
    )
    return BuiltRun(
        run,
        files,
        model_facts=facts,
        saved_config=with_absolute_paths(plan.cfg.to_dict()),
        facts=lambda: parts.describe(summary_facts(plan, task, data, engine, run)),
    )


def load_eval_tasks(plan: RunPlan, tokenizer: Any) -> TrainingTasks | None:
    """Read what --eval_tasks names, so that a wrong name costs no time; None without it. Collective."""
    options = plan.cfg.evaluation
    if not options.eval_tasks or not evaluates(plan.cfg):
        return None
    device = plan.context.device if options.eval_tasks_device == "auto" else torch.device("cpu")
    settings = TaskSettings(
        options.eval_tasks,
        options.eval_tasks_limit,
        options.eval_tasks_num_fewshot,
        options.eval_tasks_batch_size,
        options.eval_tasks_apply_chat_template,
        str(device),
        plan.cfg.model.trust_remote_code,
    )
    tasks = TrainingTasks(plan.folder, tokenizer, settings)
    tasks.load()
    return tasks


def load_start_weights(plan: RunPlan, engine: Engine) -> None:
    """Load the weights from which the run starts. A resumed run gets them from its checkpoint instead, unless it trains
    adapters: then the checkpoint holds only the adapters."""
    if plan.cfg.model.random_init:
        engine.random_init(plan.cfg.train.seed)
    elif plan.resumed is None or plan.adapts:
        engine.load_hf(plan.folder)
    else:
        engine.keep(plan.folder)


def start_from_reference(
    plan: RunPlan, engine: Engine, every_row_once: Mapping[bool, EvaluationSource]
) -> dict[bool, PrecomputedReferenceLogprobs]:
    """Load the weights of the reference, and keep them or compute the reference's scores of all rows; then load the
    model's own weights, if they differ and no checkpoint brings them. Collective.

    Returns:
        The reference's scores, for training data (True) and evaluation data (False), if they are computed before
        training (`--precompute_ref_log_probs`).
    """
    # The reference; a checkpoint has it if training has updated it (`--sync_ref_model`).
    preference = plan.cfg.preference
    updated = None if plan.resumed is None else plan.resumed / REFERENCE
    if updated is not None and updated.exists():
        engine.load_hf(updated)
    else:
        engine.load_hf(plan.folder if preference.ref_model is None else Path(preference.ref_model))

    # Its scores now, or its weights for later.
    scores: dict[bool, PrecomputedReferenceLogprobs] = {}
    if preference.precompute_ref_log_probs:
        scores = ask_reference(plan, engine, every_row_once)
    else:
        engine.keep_reference(preference.offload_reference)

    # The model's own weights.
    if plan.resumed is None and preference.ref_model is not None:
        engine.load_hf(plan.folder)
    return scores


def ask_reference(
    plan: RunPlan, engine: Engine, every_row_once: Mapping[bool, EvaluationSource]
) -> dict[bool, PrecomputedReferenceLogprobs]:
    """Compute the reference's scores of all rows, and do not keep the weights of the reference. With adapters, those
    from which training continues are kept. Collective."""
    if plan.adapts:
        engine.keep_reference()
    names = {True: "the training data", False: "the evaluation data"}
    with engine.reference() if plan.adapts else nullcontext():
        return {
            training: compute_reference_logprobs(rows, partial(batch_logprobs, engine), names[training])
            for training, rows in every_row_once.items()
        }


def forward_pass_count_before_step(cfg: SwiftConfig, dp: int = 1) -> float:
    """Count the forward passes of a step before it trains: for a reference, or a policy's log-probabilities."""
    if cfg.task in RL:
        return rl_settings(cfg, dp).forward_passes
    return forward_passes_before_step(cfg)


def model_files(plan: RunPlan, engine: Engine, tokenizer: Any, task: Task) -> ModelFiles:
    """Build the writer of the Hugging Face files of the model that trains."""
    more = dict(task.side_files(plan, tokenizer))
    if plan.cfg.data.chat_template:
        more[TEMPLATE] = tokenizer.chat_template
    classes = plan.spec.hf_config if plan.cfg.task in CLASSIFIERS else None
    return ModelFiles(engine, plan.folder, plan.base, plan.adapts, plan.cfg.lora.merge_lora, more, classes)


def model_facts(plan: RunPlan) -> dict[str, Any]:
    """Collect the facts about the model that must be the same when a checkpoint is resumed: its shape and, with
    adapters, a fingerprint of the base weights. Collective."""
    shape = {name: getattr(plan.spec, name) for name in SHAPE}
    if plan.spec.labels > 1:
        shape["labels"] = plan.spec.labels
    if not plan.adapts:
        return shape
    base_folders = {"base_weights": plan.folder}
    if plan.cfg.task in PPO:
        base_folders["critic_weights"] = critic_start_folder(plan.cfg.critic, plan.folder)
    return shape | {
        name: distributed.run_on_rank0(partial(sampled_weights_fingerprint, folder))
        for name, folder in base_folders.items()
    }


def run_hooks(
    plan: RunPlan,
    task: Task,
    engine: Engine,
    files: ModelFiles,
    data: TaskData,
    plateau: Hook | None,
    flops: Sequence[StepFlopFormula],
    facts: Mapping[str, Any],
) -> list[Hook]:
    """Build the hooks that every run has, in the order in which they act within a step: metrics first, the
    checkpoint last."""
    cfg = plan.cfg
    train = cfg.train
    options = cfg.evaluation
    saves = cfg.checkpoint
    outputs = plan.outputs
    global_batch_size = batch_plan(train, plan.layout.dp).global_batch_size

    # Metrics, the progress bar, trackers.
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    peak = peak_tflops(device, str(engine.dtype).removeprefix("torch."))
    speed = ThroughputFormula(flops, plan.layout.world_size, peak)
    hooks: list[Hook] = [
        MetricsJsonlHook(outputs.metrics, train.logging_steps, speed, task.count, train.logging_first_step),
        SkippedStepAndLossSpikeMonitor(),
        Progress(unit={"rows": "texts", "labels": "labels"}.get(task.count, "label tokens")),
    ]
    if cfg.profiling.profile:
        hooks.insert(0, StepProfilerHook(cfg.profiling, outputs.profile))
    hooks += tracker_hooks(
        cfg.trackers.report_to, TrackedRun(outputs.root, cfg.to_dict(), cfg.trackers.run_name, cfg.trackers)
    )

    # Evaluation, and the hooks that act on its results.
    rows = data.evaluation
    if evaluates(cfg) and (rows is not None or (data.eval_tasks is not None and not data.held_out)):
        limit = None if train.eval_iters is None else train.eval_iters * global_batch_size
        eval_interval = interval_of(options.eval_strategy, options.eval_steps)
        batches = tuple if rows is None else partial(rows.eval_batches, limit)
        start = options.eval_on_start
        more = (data.eval_tasks, task.measure(plan))
        hooks.append(EvaluationHook(outputs.evaluation, batches, eval_interval, task.count, start, *more))
    best = None
    if compares_evaluations(cfg):
        best = best_model_hook(options, best_model_metric(cfg), outputs.store.root)
        hooks.append(best)
    if plateau is not None:
        hooks.append(plateau)
    hooks += make_user_hooks(PLUGIN_HOOKS)

    # Checkpoints. The manifest is what a resumed run is compared with.
    manifest: dict[str, Any] = {
        "task": cfg.task,
        "model": facts,
        "layout": asdict(plan.layout),
        "config": with_absolute_paths(cfg.to_dict()),
        "global_batch_size": global_batch_size,
    }
    if plan.adapts:
        manifest["base"] = plan.base
    save_interval = interval_of(saves.save_strategy, saves.save_steps)
    checkpoint = CheckpointHook(outputs.store, save_interval, saves.save_total_limit, manifest)
    checkpoint.best = best
    if saves_by_time(saves):
        checkpoint.timed = TimedSaves(checkpoint_size(plan, engine.report()))
    checkpoint.exit_interval = saves.exit_interval
    checkpoint.background = saves.async_save
    checkpoint.attach = files.describe
    if not saves.save_only_model:
        sizes = engine.report()
        checkpoint.size = sizes.optimizer_bytes + sizes.host_bytes  # a lower bound: the state of one rank
    if cfg.preference.sync_ref_model:
        checkpoint.write_more = files.write_moved_reference
    if plan.adapts:
        checkpoint.write_more = files.write_adapter_of_step
    if saves.save_only_model:
        checkpoint.write_weights_only = checkpoint.write_more if plan.adapts else files.write_weights_of_step
    return [*hooks, *fault_tolerance_hooks(cfg.fault_tolerance, checkpoint), checkpoint]


def checkpoint_size(plan: RunPlan, sizes: EngineSizeReport) -> int:
    """Estimate the bytes of a checkpoint of all ranks; 0 where that is not known before the first one."""
    if plan.cfg.checkpoint.save_only_model or plan.adapts or plan.cfg.engine.engine != NATIVE:
        return 0
    layout = plan.layout
    sharded = plan.cfg.parallel.distributed_optimizer and can_shard_optimizer(plan.cfg)
    states = sizes.optimizer_bytes * (layout.dp * layout.cp if sharded else 1)
    return round((sizes.weight_bytes + states) * sizes.parameters_total / sizes.parameters_per_rank)


def fault_tolerance_hooks(options: FaultToleranceConfig, checkpoint: CheckpointHook) -> list[Hook]:
    """Build the hooks for faults that the options ask for. They stand before `checkpoint`, so that it does not save a
    state that one of them refuses."""
    hooks: list[Hook] = []
    if options.log_straggler:
        hooks.append(StragglerHook(options.straggler_ratio))
    if options.preemption_command:
        hooks.append(PreemptionNoticeHook(options.preemption_command, options.preemption_interval))
    if options.gpu_health_interval:
        hooks.append(GpuHealthHook(options.gpu_health_interval))
    if options.check_replicas_interval:
        replicas = ReplicaCheckHook(options.check_replicas_interval)
        checkpoint.before_save = replicas.check
        hooks.append(replicas)
    return hooks


# ---------------------------------------------------------------------------------------------------------------------
# The first screen
# ---------------------------------------------------------------------------------------------------------------------


def summary_facts(plan: RunPlan, task: Task, data: TaskData, engine: Engine, run: Run) -> SummaryFacts:
    """Collect the facts of the first screen. Collective."""
    spec = plan.spec
    layout = plan.layout
    experts = f", {spec.experts} experts, {spec.topk} active" if spec.experts else ""
    ahead = f" + {spec.mtp_layers} for multi-token prediction" if spec.mtp_layers else ""
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, gloo"
    grid = ""
    if layout.world_size > 1:
        grid = rank_grid_text(layout, spec.num_layers, PipelineSplit.from_config(plan.cfg.parallel), spec.mtp_layers)
    processes = log.count_text(layout.world_size, "process")
    evaluation_rows = 0 if data.evaluation is None else len(data.evaluation.data)
    return SummaryFacts(
        title=task.title,
        model=f"{spec.family}, {spec.num_layers} layers{ahead} x {spec.hidden_size}, "
        f"{spec.heads} heads ({spec.kv_heads} KV), vocabulary {spec.vocab_size:,}"
        f"{experts}: {shown_model_folder(plan.folder)}{' (random weights)' if plan.cfg.model.random_init else ''}",
        parameters=engine.report(),
        layout=f"{layout.describe()} on {processes} ({where})",
        picture=grid,
        kernels=engine.kernels,
        data=data_text(data.source.stats, evaluation_rows, task.scored),
        dp=layout.dp,
        accumulation=batch_plan(plan.cfg.train, layout.dp).accumulation,
        total_steps=run.total_steps,
        rows_per_epoch=data.source.rows,
        start=run.step,
        unit=task.unit,
        reference=reference_text(plan.cfg, plan.adapts),
        fit=plan.fit,
        more=prefix_sharing_rows(plan.cfg, spec, layout),
    )


def reference_text(cfg: SwiftConfig, adapts: bool) -> str:
    """Describe the reference on the first screen; empty where the task has none."""
    if not needs_reference(cfg):
        return ""
    preference = cfg.preference
    if adapts and cfg.lora.adapters is None:
        text = "the base model without adapters"
    else:
        text = preference.ref_model or ("the initial adapters" if adapts else "the initial model")
    if preference.offload_reference:
        text += ", offloaded to the CPU when idle"
    if preference.sync_ref_model:
        text += f", updated by {preference.ref_model_mixup_alpha:g} every {preference.ref_model_sync_steps} steps"
    if preference.precompute_ref_log_probs:
        text += ", evaluated once before the first step"
    return text
