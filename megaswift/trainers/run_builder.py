"""Builds the components of a run on a rank: tokenizer, data, engine, hooks, and the facts for the run summary.

Owns which part gets which option. Nothing here trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megaswift import distributed, log
from megaswift.bridge.weights_fingerprint import sampled_weights_fingerprint
from megaswift.config import SwiftConfig
from megaswift.config.absolute_paths_in_saved_config import with_absolute_paths
from megaswift.config.adapter_rules import SHARDED
from megaswift.config.batch_arithmetic import batch_plan
from megaswift.config.data import PPO
from megaswift.config.evaluation_rules import evaluates
from megaswift.config.preference import needs_reference
from megaswift.data import build_batch_sources as data
from megaswift.data.collate_preference_batches import kto_kl_batches, labeled_documents, previous_in_global_batch
from megaswift.data.load_tokenizer import score_padding_token
from megaswift.data.loader import BatchSource, EvaluationSource, TokenStoreBatchSource
from megaswift.data.model_tokenizer import tokenizer_with_run_template, training_processor
from megaswift.data.numbered_rows_batch_source import LoaderGeometry
from megaswift.data.stream_batches import StreamBatchSource
from megaswift.data.vision_processor import Processor, tokenizer_of_tokenizer_or_processor
from megaswift.engine.protocol import Engine
from megaswift.folders.checkpoint import MODEL
from megaswift.losses.contract import Batch
from megaswift.models.scalar_head import with_pad_token_id
from megaswift.models.spec import ModelSpec
from megaswift.models.vision import has_vision_tower
from megaswift.parallel.layout import Layout
from megaswift.parallel.layout_grid_text import rank_grid_text
from megaswift.parallel.pipeline_split import PipelineSplit
from megaswift.parallel.row_padding import fp8_token_multiple, needs_rows_of_full_length, row_padding_multiple
from megaswift.trainers.add_preference_loss_fields_to_batches import (
    BatchTransform,
    batch_logprobs,
    forward_pass_count_before_step,
    make_batch_transform,
)
from megaswift.trainers.best_model import best_model_hook
from megaswift.trainers.checkpoint_hook import CheckpointHook
from megaswift.trainers.choose_prefix_sharing import prefix_sharing_rows
from megaswift.trainers.create_process_groups_and_engine import RankContext, make_engine
from megaswift.trainers.evaluation import EvaluationHook, eval_accumulation
from megaswift.trainers.fault_tolerance_hooks import fault_tolerance_hooks
from megaswift.trainers.flops import StepFlopFormula, peak_tflops, step_flop_formula
from megaswift.trainers.hook import PLUGIN_HOOKS, Hook
from megaswift.trainers.metrics_jsonl import MetricsJsonlHook, ThroughputFormula
from megaswift.trainers.output_folder import OutputFolder
from megaswift.trainers.progress import Progress
from megaswift.trainers.reduce_lr_on_plateau import plateau_hooks
from megaswift.trainers.reference_logprobs_precomputed_in_memory import (
    PrecomputedReferenceLogprobs,
    compute_reference_logprobs,
)
from megaswift.trainers.rl.critic import critic_start_folder
from megaswift.trainers.skipped_step_and_loss_spike_monitor import SkippedStepAndLossSpikeMonitor
from megaswift.trainers.startup_summary import SummaryFacts, data_text
from megaswift.trainers.step_interval import interval_of
from megaswift.trainers.step_profiler import StepProfilerHook
from megaswift.trainers.tasks import TASKS, Task
from megaswift.trainers.trackers import TrackedRun, tracker_hooks

TEMPLATE = "chat_template.jinja"
REFERENCE, HF = "reference", "hf"
"""Within a checkpoint: a reference that moves."""
SHAPE = (
    *("family", "num_layers", "hidden_size", "heads", "kv_heads", "head_dim"),
    *("ffn", "vocab_size", "tied", "experts", "topk", "expert_ffn"),
)
"""What a checkpoint and the model it is loaded into must agree on."""


@dataclass
class RunBuilder:
    """One run on one rank, in the order in which its parts are made."""

    cfg: SwiftConfig
    spec: ModelSpec
    folder: Path
    """The model's Hugging Face folder."""
    context: RankContext
    outputs: OutputFolder
    tokenizer: Any = None
    processor: Processor | None = None
    resumed: Path | None = None
    """The checkpoint that the run goes on from."""
    seconds: dict[str, float] = field(default_factory=dict)
    sources: dict[bool, EvaluationSource] = field(default_factory=dict)
    """Every row once, by whether it is trained on: what a reference that is asked before training is to score."""
    known: dict[bool, PrecomputedReferenceLogprobs] = field(default_factory=dict)
    """What it said."""
    fit: str = ""
    """What `--fit` has chosen, for the run summary."""
    rules: list[StepFlopFormula] = field(default_factory=list)
    """Of each model that trains."""

    @property
    def layout(self) -> Layout:
        """The ranks' grid."""
        return self.context.layout

    @property
    def task(self) -> Task:
        """What is trained."""
        return TASKS.get(self.cfg.task)

    @property
    def adapts(self) -> bool:
        """Whether adapters train, and the model's folder keeps its weights."""
        return self.cfg.model.train_type != "full"

    @property
    def base(self) -> str:
        """Name of the base model, for those who load the adapters: the hub id, or the folder."""
        local = Path(str(self.cfg.model.model)).exists() or self.folder.is_relative_to(self.outputs.root)
        return str(self.folder.resolve()) if local else str(self.cfg.model.model)

    def geometry(self) -> LoaderGeometry:
        """What the loader must know of this rank and its batches."""
        plan, layout = batch_plan(self.cfg.train, self.layout.dp), self.layout
        return LoaderGeometry(
            dp_rank=self.context.coordinates.dp,
            dp_size=layout.dp,
            per_device=plan.per_device,
            accumulation=plan.accumulation,
            doc_multiple=2 * layout.cp if layout.cp > 1 else 1,
            row_multiple=row_padding_multiple(layout, fp8_token_multiple(self.cfg.model, layout.sequence_parallel)),
            uniform=layout.pp > 1,
            full_length=needs_rows_of_full_length(self.cfg.model, self.cfg.parallel.tp_comm_overlap, layout),
            seed=data.data_seed(self.cfg.data, self.cfg.train),
            vocabulary=0 if has_vision_tower(self.spec.hf_config) else self.spec.vocab_size,  # or an image's beyond it
            divided_weights=self.cfg.engine.engine in SHARDED,
        )

    def reader(self) -> Any:
        """What the model's texts are read with: its tokenizer, or a vision-language model's `Processor`."""
        if has_vision_tower(self.spec.hf_config):
            self.processor = training_processor(self.cfg, self.folder)
        return self.processor or tokenizer_with_run_template(self.cfg, self.folder)

    def data(self) -> tuple[BatchSource, EvaluationSource | None]:
        """Tokenizer, then training and evaluation batches. Evaluation passes as many micro-batches at a time as a
        pipeline has stages."""
        reader = self.reader()
        self.tokenizer = tokenizer_of_tokenizer_or_processor(reader)
        if self.spec.scored:
            config = {"vocab_size": self.spec.vocab_size, **self.spec.hf_config}
            padding = score_padding_token(self.tokenizer, config)
            self.spec = replace(
                self.spec,
                hf_config=with_pad_token_id(self.spec.hf_config, padding),
                features=replace(self.spec.features, padding_token=padding),
            )
        source, evaluation = data.build_train_and_eval_sources(
            self.cfg.data, self.cfg.train, reader, self.geometry(), self.cfg.task, self.task.prompt_labels
        )
        if evaluation is not None:
            passes = eval_accumulation(self.cfg, self.layout)
            evaluation = replace(evaluation, geometry=replace(evaluation.geometry, accumulation=passes))
        if isinstance(source, StreamBatchSource):
            source.spread = distributed.map_over_ranks
        if isinstance(source, TokenStoreBatchSource):
            once = EvaluationSource(source.data, replace(source.geometry, accumulation=self.layout.pp), source.shape)
            self.sources = {True: once} if evaluation is None else {True: once, False: evaluation}
        return source, evaluation

    def scheduled(self, total_steps: int) -> SwiftConfig:
        """The configuration with the steps over which AdaLoRA allocates ranks."""
        allocates = self.cfg.model.train_type == "adalora" and self.cfg.peft.total_step is None
        return self.cfg.replace(total_step=total_steps) if allocates else self.cfg

    def engine(self, fresh: bool, total_steps: int) -> Engine:
        """The model; `fresh` False leaves its weights to a checkpoint, which of a run with adapters holds the adapters
        only."""
        engine = make_engine(self.scheduled(total_steps), self.spec, self.folder, self.context)
        if needs_reference(self.cfg):
            self.start_from_reference(engine, fresh)
        elif self.cfg.model.random_init:
            engine.random_init(self.cfg.train.seed)
        elif fresh or self.adapts:
            engine.load_hf(self.folder)
        else:
            engine.keep(self.folder)
        return engine

    def start_from_reference(self, engine: Engine, fresh: bool) -> None:
        """The reference's weights first; then the model's own, where they are others and no checkpoint brings them."""
        p = self.cfg.preference
        moved = None if self.resumed is None else self.resumed / REFERENCE
        if moved is not None and moved.exists():
            engine.load_hf(moved)
        else:
            engine.load_hf(self.folder if p.ref_model is None else Path(p.ref_model))
        if p.precompute_ref_log_probs:
            self.known = self.ask_reference(engine)
        else:
            engine.keep_reference(p.offload_reference)
        if fresh and p.ref_model is not None:
            engine.load_hf(self.folder)

    def ask_reference(self, engine: Engine) -> dict[bool, PrecomputedReferenceLogprobs]:
        """The reference's numbers of all rows; nothing of it stays in memory but adapters that go on."""
        if self.adapts:
            engine.keep_reference()
        with engine.reference() if self.adapts else nullcontext():
            return {
                training: compute_reference_logprobs(
                    once,
                    partial(batch_logprobs, engine),
                    "the training data" if training else "the evaluation data",
                )
                for training, once in self.sources.items()
            }

    def preparation(self) -> BatchTransform | None:
        """What adds to batches what the task's loss reads."""
        return make_batch_transform(self.cfg, self.mismatched, self.known)

    def mismatched(self, batches: Sequence[Batch], over_global_batch: bool) -> list[Batch]:
        """KTO's other answers, in batches of the run's shape."""
        geometry, place = self.geometry(), self.context.coordinates
        answers = None
        if over_global_batch:
            first = place.tp == place.pp == place.cp == 0  # the other ranks of a replica have the same batches
            shares = distributed.all_gather_merged_dict({place.dp: labeled_documents(batches)} if first else {})
            answers = previous_in_global_batch([shares[rank] for rank in range(geometry.dp_size)], place.dp)
        shape = data.padding_shape_of(self.tokenizer, geometry)
        return kto_kl_batches(batches, shape, self.cfg.data.max_length, geometry.uniform, answers)

    def hooks(self, engine: Engine, evaluation: EvaluationSource | None) -> list[Hook]:
        """In the order of their work within a step: lines first, the checkpoint last."""
        train, outputs, task = self.cfg.train, self.outputs, self.task
        hooks: list[Hook] = [
            MetricsJsonlHook(
                outputs.metrics, train.logging_steps, self.speed(engine), task.count, train.logging_first_step
            ),
            SkippedStepAndLossSpikeMonitor(),
            Progress(),
        ]
        if train.profile:
            hooks.insert(0, StepProfilerHook(train, outputs.profile))
        tracked = TrackedRun(outputs.root, self.cfg.to_dict(), train.run_name, self.cfg.trackers)
        hooks += tracker_hooks(train.report_to, tracked)
        if evaluation is not None and evaluates(self.cfg):
            size = batch_plan(train, self.layout.dp).global_batch_size
            limit = None if train.eval_iters is None else train.eval_iters * size
            every = interval_of(train.eval_strategy, train.eval_steps)
            batches = partial(evaluation.eval_batches, limit)
            hooks.append(EvaluationHook(outputs.evaluation, batches, every, task.count, train.eval_on_start))
        if (best := best_model_hook(self.cfg, outputs.store.root)) is not None:
            hooks.append(best)
        hooks += [*plateau_hooks(self.cfg), *(make() for make in PLUGIN_HOOKS.values())]
        every = interval_of(train.save_strategy, train.save_steps)
        checkpoint = CheckpointHook(outputs.store, every, train.save_total_limit, self.checkpoint_facts())
        checkpoint.best, checkpoint.exit_interval = best, train.exit_interval
        checkpoint.background = train.async_save
        checkpoint.attach = partial(self.attach, engine)
        if not train.save_only_model:
            sizes = engine.report()
            checkpoint.size = sizes.optimizer_bytes + sizes.host_bytes  # of one rank: a checkpoint holds no less
        if self.cfg.preference.sync_ref_model:
            checkpoint.beside = partial(self.keep_moved_reference, engine)
        if self.adapts:
            checkpoint.beside = lambda folder: engine.write_adapter(folder / "adapter", self.base)
        if train.save_only_model:
            checkpoint.write_weights_only = checkpoint.beside if self.adapts else partial(self.export_weights, engine)
        return [*hooks, *fault_tolerance_hooks(self.cfg.fault_tolerance, checkpoint), checkpoint]

    def checkpoint_facts(self) -> dict[str, Any]:
        """What a checkpoint's manifest says about its run."""
        size = batch_plan(self.cfg.train, self.layout.dp).global_batch_size
        facts: dict[str, Any] = {"task": self.cfg.task, "model": self.model_facts(), "layout": asdict(self.layout)}
        facts |= {"config": with_absolute_paths(self.cfg.to_dict()), "global_batch_size": size}
        return facts | ({"base": self.base} if self.adapts else {})

    def export_weights(self, engine: Engine, folder: Path) -> None:
        """The Hugging Face folder `hf` of a checkpoint that holds weights only. Collective."""
        engine.export(folder / HF, self.folder)
        distributed.run_on_rank0(lambda: self.write_template(folder / HF))

    def keep_moved_reference(self, engine: Engine, folder: Path) -> None:
        """A reference that has moved is part of the run's state: in float32, which loses nothing of it. Collective."""
        with engine.reference():
            engine.export(folder / REFERENCE, self.folder, torch.float32)

    def attach(self, engine: Engine, folder: Path) -> None:
        """Beside the state, what turns a checkpoint into a Hugging Face folder without the one it came from."""
        target = folder / MODEL
        engine.describe(target, self.folder)
        self.write_template(target)

    def write_template(self, folder: Path) -> None:
        """That of --chat_template, where one is given, into a model's folder."""
        if self.cfg.data.chat_template:
            (folder / TEMPLATE).write_text(self.tokenizer.chat_template, encoding="utf-8")

    def model_facts(self) -> dict[str, Any]:
        """What must be the same when a checkpoint is resumed; with adapters the base model itself."""
        shape = {name: getattr(self.spec, name) for name in SHAPE}
        if not self.adapts:
            return shape
        based = {"base_weights": self.folder} | (
            {"critic_weights": critic_start_folder(self.cfg, self.folder)} if self.cfg.task in PPO else {}
        )
        return shape | {
            name: distributed.run_on_rank0(partial(sampled_weights_fingerprint, folder))
            for name, folder in based.items()
        }

    def speed(self, engine: Engine) -> ThroughputFormula:
        """The FLOP formula of this model on these devices; other models of the run add theirs to `rules`."""
        self.rules.append(
            step_flop_formula(engine, self.spec, forward_pass_count_before_step(self.cfg, self.layout.dp))
        )
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        peak = peak_tflops(device, str(engine.dtype).removeprefix("torch."))
        return ThroughputFormula(self.rules, self.layout.world_size, peak)

    def facts(
        self, engine: Engine, source: Any, evaluation: EvaluationSource | None, total_steps: int, start: int
    ) -> SummaryFacts:
        """For the first screen."""
        s, layout = self.spec, self.layout
        experts = f", {s.experts} experts, {s.topk} active" if s.experts else ""
        where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, gloo"
        plan = batch_plan(self.cfg.train, layout.dp)
        grid = (
            rank_grid_text(layout, s.num_layers, PipelineSplit.from_config(self.cfg.parallel))
            if layout.world_size > 1
            else ""
        )
        processes = log.count_text(layout.world_size, "process")
        return SummaryFacts(
            title=self.task.title,
            model=f"{s.family}, {s.num_layers} layers x {s.hidden_size}, {s.heads} heads ({s.kv_heads} KV), "
            f"vocabulary {s.vocab_size:,}"
            f"{experts}: {self.folder}{' (random weights)' if self.cfg.model.random_init else ''}",
            parameters=engine.report(),
            layout=f"{layout.describe()} on {processes} ({where})",
            picture=grid,
            kernels=engine.kernels,
            data=data_text(source.stats, 0 if evaluation is None else len(evaluation.data), self.task.scored),
            dp=layout.dp,
            accumulation=plan.accumulation,
            total_steps=total_steps,
            rows_per_epoch=source.rows,
            start=start,
            unit=self.task.unit,
            reference=reference_model_summary_text(self.cfg, self.adapts),
            fit=self.fit,
            more=prefix_sharing_rows(self.cfg, s, layout),
        )


def reference_model_summary_text(cfg: SwiftConfig, adapts: bool) -> str:
    """For the first screen; nothing where the task has no reference."""
    if not needs_reference(cfg):
        return ""
    p = cfg.preference
    new = adapts and cfg.lora.adapters is None
    start = "the initial adapters" if adapts else "the initial model"
    what = "the base model without adapters" if new else p.ref_model or start
    where = ", offloaded to the CPU when idle" if p.offload_reference else ""
    moves = f", updated by {p.ref_model_mixup_alpha:g} every {p.ref_model_sync_steps} steps" if p.sync_ref_model else ""
    once = ", evaluated once before the first step" if p.precompute_ref_log_probs else ""
    return what + where + moves + once


def changed_options(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`learning_rate 1e-05 -> 2e-05` for every option that a resumed run has otherwise."""
    quiet = {"resume_from_checkpoint", "overwrite_output_dir", "output_dir", "add_version"}
    changes = []
    for section, values in now.items():
        before = saved.get(section)
        if isinstance(values, dict) and isinstance(before, dict):
            changes += [
                f"{n} {before.get(n)} -> {v}"
                for n, v in values.items()
                if n not in quiet and n in before and before[n] != v
            ]
    if changes and distributed.global_rank() == 0:
        log.info("differs from the checkpoint's run: " + ", ".join(changes))
    return changes
