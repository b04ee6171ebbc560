"""The task of distillation: rows as in supervised fine-tuning, a teacher beside the engine, and samplers where steps
train on completions."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from megaswift.data import build as data_sources
from megaswift.engine.protocol import Engine
from megaswift.rollout.sync_folders import SyncRounds
from megaswift.run.checks.adapter_sync import adapter_rank, syncs_adapters_only
from megaswift.run.dataset_task import DatasetTask
from megaswift.run.plan import RunPlan
from megaswift.run.policy_task import (
    build_sampler,
    build_sampler_in_freed_memory,
    ranks_per_engine,
    sync_folder_of,
)
from megaswift.run.ray_roles import check_ray_room
from megaswift.run.summary import SummaryFacts
from megaswift.run.task import TaskData, TaskParts
from megaswift.run.teacher import TeacherModel, build_teacher, teacher_text
from megaswift.trainers.distillation.batches import DistillationBatches, Writers
from megaswift.trainers.distillation.index import has_teacher_logits
from megaswift.trainers.distillation.largest import TeacherSource
from megaswift.trainers.distillation.on_policy import CompletedRows
from megaswift.trainers.distillation.options.distillation import samples_in_training
from megaswift.trainers.distillation.server import ServerTeacher
from megaswift.trainers.distillation.stored import StoredTeacher, write_teacher_logits
from megaswift.trainers.hook import Rate
from megaswift.trainers.rl.generation import CompletionGenerator
from megaswift.trainers.rl.sampler import sampling_params_of, weight_receivers
from megaswift.trainers.rl.scheduler import Timed, lend_device


@dataclass(frozen=True)
class DistillationTask(DatasetTask):
    """Rows of supervised fine-tuning; each step compares the model's distributions with a teacher's."""

    rows_of: str = "sft"

    def read(self, plan: RunPlan) -> tuple[RunPlan, TaskData]:
        """Read tokenized rows, once the teacher's server has answered."""
        check_ray_room(plan.cfg)
        url = plan.cfg.distillation.teacher_model_server
        k = plan.cfg.distillation.gkd_logits_topk
        if url is not None and k is not None:
            ServerTeacher(url, k, plan.layout, plan.context.rank).reach()
        return super().read(plan)

    def attach(self, plan: RunPlan, data: TaskData, engine: Engine, rate: Rate) -> TaskParts:
        """Build the teacher, and the samplers where steps train on completions."""
        source, text, model = teacher_of_run(plan, data, engine)
        writers = build_writers(plan, data, engine, model) if samples_in_training(plan.cfg) else None
        batches = DistillationBatches(source, writers)

        def describe(facts: SummaryFacts) -> SummaryFacts:
            return replace(facts, more=(*facts.more, ("teacher", text)))

        return TaskParts(
            data.source,
            first_hooks=[batches],
            prepare=batches.prepare,
            prepare_before_counts=True,
            agree_before_batch=True,
            step_extras=batches.step_extras,
            describe=describe,
        )


def teacher_of_run(plan: RunPlan, data: TaskData, engine: Engine) -> tuple[TeacherSource, str, TeacherModel | None]:
    """Return the source of the teacher's numbers, its description for the first screen, and the teacher's model where
    it is in these processes. Collective."""
    options = plan.cfg.distillation
    k = options.gkd_logits_topk
    temperature = plan.cfg.rollout.temperature

    if options.teacher_model_server is not None:
        assert k is not None, "the rules ask for it"
        server = ServerTeacher(options.teacher_model_server, k, plan.layout, plan.context.rank)
        server.check(data.tokenizer)
        return server, f"{server.model} at {options.teacher_model_server}, its {k} largest probabilities", None

    folder = None if options.teacher_logits is None else Path(options.teacher_logits).expanduser()
    if folder is not None and has_teacher_logits(folder):
        stored = StoredTeacher(folder, temperature, k, data.every_row_once)
        text = (
            f"{stored.facts['teacher_model']}, its {stored.facts['gkd_logits_topk']} largest probabilities in {folder}"
        )
        return stored, text, None

    model = build_teacher(plan)
    features = model.spec.features
    model.teacher.give_head(engine, features.logit_scale, features.logit_softcap)
    if folder is None:
        return model.teacher, teacher_text(plan, model), model
    assert k is not None, "the rules ask for it"
    facts = {"teacher_model": options.teacher_model, "gkd_logits_topk": k, "temperature": temperature}
    write_teacher_logits(
        folder, dict(data.every_row_once), lambda batches: model.teacher.largest(engine, batches, k, temperature), facts
    )
    engine.set_teacher_head(None)
    stored = StoredTeacher(folder, temperature, k, data.every_row_once)
    return stored, f"{options.teacher_model}, its {k} largest probabilities", None


def build_writers(plan: RunPlan, data: TaskData, engine: Engine, model: TeacherModel | None) -> Writers:
    """Build the samplers of the model and, for `seq_kd`, of the teacher. Collective."""
    cfg = plan.cfg
    options = cfg.distillation
    geometry = plan.geometry()
    sampling = sampling_params_of(cfg.rollout, data.tokenizer, plan.folder)
    receivers = weight_receivers(cfg.rollout.rollout_backend, cfg.placement.sampler_engines)
    shared = ranks_per_engine(cfg)
    place = plan.context.coordinates

    # The model's own sampler.
    student = None
    offloaded = {"optimizer": cfg.rollout.offload_optimizer, "model": cfg.rollout.offload_model}
    parts = frozenset(part for part, moves in offloaded.items() if moves)
    if options.lmbda > 0:
        alone = plan.adapts and syncs_adapters_only(cfg, plan.spec, plan.folder)
        sampler = build_sampler_in_freed_memory(plan, engine, parts, adapter_rank(cfg.lora) if alone else 0)
        adapters = SyncRounds(sync_folder_of(cfg, plan.folder), "adapter") if alone else None
        student = CompletionGenerator(
            engine, place, sampler, sampling, cfg.train.seed, None, adapters, plan.base, receivers, shared
        )

    # The teacher's, whose weights never change.
    teacher = None
    if options.seq_kd and options.lmbda < 1:
        assert model is not None, "the rules ask for a teacher in these processes"
        dtype = str(model.teacher.engine.dtype).removeprefix("torch.")
        writer = build_sampler(cfg, model.spec, model.folder, model.context, dtype, 0)
        teacher = CompletionGenerator(
            model.teacher.engine,
            model.context.coordinates,
            writer,
            sampling,
            cfg.train.seed,
            receivers=receivers,
            ranks_per_engine=shared,
        )
        with model.teacher.active():
            teacher.synchronize()

    def lend(timed: Timed) -> AbstractContextManager[None]:
        assert student is not None, "nothing is sampled from the model"
        return lend_device(student, [engine], parts, cfg.rollout.rollout_sleep, False, timed)

    shape = data_sources.padding_shape_of(data.tokenizer, geometry)
    rows = CompletedRows(shape, geometry.uniform, cfg.data.padding_free is True, cfg.data.max_length)
    return Writers(cfg.train.seed, options.lmbda, options.seq_kd, rows, student, teacher, lend)
