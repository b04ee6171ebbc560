"""Builds the teacher of a run: a model beside the one that trains, in a layout of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaswift.base.byte_size import bytes_text
from megaswift.engine.options.engine_checks import NATIVE, requested_engine
from megaswift.models.spec import ModelSpec
from megaswift.run.checks.distillation import locate_teacher, teacher_config, teacher_layout
from megaswift.run.engines import RankContext, make_engine
from megaswift.run.plan import RunPlan
from megaswift.trainers.distillation.teacher import Teacher


@dataclass(frozen=True)
class TeacherModel:
    """A teacher with what a run needs to know of its model."""

    teacher: Teacher
    spec: ModelSpec
    folder: Path
    context: RankContext


def build_teacher(plan: RunPlan) -> TeacherModel:
    """Build the teacher of a run, with its weights. Collective."""
    cfg = teacher_config(plan.cfg)
    folder, spec = locate_teacher(cfg)
    context: Any = plan.context
    active: Callable[[], AbstractContextManager[None]] = nullcontext
    if requested_engine(cfg) == NATIVE:
        layout = teacher_layout(plan.cfg, plan.layout.world_size)
        if layout is not None and layout != plan.layout:
            context = context.beside(layout)
            active = context.active
    with active():
        engine = make_engine(cfg, spec, folder, context, trains=False)
        engine.load_hf(folder)
    offload = plan.cfg.distillation.offload_teacher_model
    return TeacherModel(Teacher(engine, plan.layout, active, offload), spec, folder, context)


def teacher_text(plan: RunPlan, model: TeacherModel) -> str:
    """Describe the teacher for the first screen. Collective."""
    engine = model.teacher.engine
    with model.teacher.active():
        sizes = engine.report()
    width = engine.dtype.itemsize
    states = engine.hidden_size * width
    logits = engine.vocab_size * width
    layout = engine.layout
    axes = " ".join(f"{axis}{size}" for axis, size in layout.axes.items() if size > 1) or f"dp{layout.dp}"
    text = (
        f"{plan.cfg.distillation.teacher_model}: {sizes.parameters_total:,} parameters on {axes}, "
        f"{bytes_text(sizes.weight_bytes)} on the largest rank"
    )
    if layout != plan.layout:
        text += f"; {bytes_text(states)} a token to the model's ranks (logits: {bytes_text(logits)})"
    return text
