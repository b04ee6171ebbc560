"""Checks of a teacher before a run: its configuration, its files, its tokenizer, its layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaswift.bridge.adapters.options.checks import SHARDED
from megaswift.config import SwiftConfig
from megaswift.engine.options.engine_checks import NATIVE, requested_engine
from megaswift.errors import Problem
from megaswift.folders.source import locate_model
from megaswift.models.spec import ModelSpec
from megaswift.options.tasks import DISTILLATION
from megaswift.parallel.checks import layout_problems
from megaswift.parallel.constraints import LayoutRequest
from megaswift.parallel.layout import Layout
from megaswift.parallel.model_shape import ModelShape
from megaswift.run.checks.model_spec import model_spec_for_task
from megaswift.trainers.distillation.options.distillation import INDEX, TEACHER_AXES


def teacher_config(cfg: SwiftConfig) -> SwiftConfig:
    """Return the configuration of the teacher's engine: the run's, as far as it says how a model computes."""
    options = cfg.distillation
    model = cfg.model
    values: dict[str, Any] = {
        "model": options.teacher_model,
        "torch_dtype": model.torch_dtype,
        "attn_impl": model.attn_impl,
        "trust_remote_code": model.trust_remote_code,
        "use_hf": model.use_hf,
        "max_length": cfg.data.max_length,
        "ddp_timeout": cfg.parallel.ddp_timeout,
        "seed": cfg.train.seed,
        "output_dir": cfg.checkpoint.output_dir,
    }
    if requested_engine(cfg) != NATIVE:
        # DeepSpeed would want an optimizer; FSDP2 shards as ZeRO-3 does
        values["engine"] = "fsdp2" if requested_engine(cfg) in SHARDED else "ddp"
        return SwiftConfig(task="sft", **values)
    values["engine"] = NATIVE
    values["transformer_impl"] = model.transformer_impl
    run = cfg.parallel
    own = {
        "tensor_parallel_size": (options.teacher_tensor_parallel_size, run.tensor_parallel_size),
        "pipeline_parallel_size": (options.teacher_pipeline_parallel_size, run.pipeline_parallel_size),
        "context_parallel_size": (options.teacher_context_parallel_size, run.context_parallel_size),
        "expert_parallel_size": (options.teacher_expert_parallel_size, run.expert_parallel_size),
    }
    values |= {name: of_run if given is None else given for name, (given, of_run) in own.items()}
    if options.teacher_tensor_parallel_size is None:
        values["sequence_parallel"] = run.sequence_parallel
    return SwiftConfig(task="sft", **values)


def teacher_layout(cfg: SwiftConfig, world_size: int) -> Layout | None:
    """Return the layout of a teacher on the native engine; None for a run without one."""
    if cfg.task not in DISTILLATION or cfg.distillation.teacher_model is None or requested_engine(cfg) != NATIVE:
        return None
    return Layout.from_config(teacher_config(cfg).parallel, world_size)


def teacher_problems(cfg: SwiftConfig, world_size: int) -> list[Problem]:
    """Report a teacher that is missing, does not fit the ranks, or reads tokens of another tokenizer."""
    if cfg.task not in DISTILLATION:
        return []
    options = cfg.distillation
    if options.teacher_model_server is not None:
        return []
    if options.teacher_logits is not None and options.teacher_model is None:
        if (Path(options.teacher_logits).expanduser() / INDEX).is_file():
            return []
        rule = "has no probabilities of a teacher yet"
        return [Problem(f"--teacher_logits {options.teacher_logits}", rule, "give --teacher_model too, to write them")]
    if options.teacher_model is None:
        return [Problem("teacher_model", f"is missing: {cfg.task} learns from a teacher", "--teacher_model DIR")]
    teacher = teacher_config(cfg)
    folder = locate_model(teacher.model, weights=False)
    spec = model_spec_for_task(teacher, folder)
    request = LayoutRequest.of(teacher.parallel, world_size, cfg.data.max_length, teacher.train)
    unfit = layout_problems(ModelShape.of(spec), request) if requested_engine(teacher) == NATIVE else []
    named = [replace(p, what=_teacher_option(p.what), fix=_teacher_option(p.fix)) for p in unfit]
    return named or [*tokenizer_problems(cfg, folder, spec)]


def _teacher_option(text: str) -> str:
    for short, long in TEACHER_AXES.items():
        text = text.replace(f"--{short} ", f"--teacher_{short} ").replace(
            f"{long}_parallel", f"teacher_{long}_parallel"
        )
    return text


def tokenizer_problems(cfg: SwiftConfig, folder: Path, spec: ModelSpec) -> Iterator[Problem]:
    """Report a teacher whose tokens are others than the model's."""
    from megaswift.data.tokenizer import load_tokenizer  # brings transformers

    own = load_tokenizer(locate_model(cfg.model, weights=False), cfg.model.trust_remote_code, "").get_vocab()
    theirs = load_tokenizer(folder, cfg.model.trust_remote_code, "").get_vocab()
    different = sorted(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name))
    if different:
        example = different[0]
        rule = (
            f"has another tokenizer than --model {cfg.model.model}: {len(different):,} of {len(own):,} tokens differ, "
            f"such as {example!r} ({own.get(example, 'none')} here, {theirs.get(example, 'none')} there)"
        )
        yield Problem(
            f"--teacher_model {cfg.distillation.teacher_model}",
            rule,
            "use a teacher of the model's own family, or train with sft on answers that the teacher wrote: "
            "megaswift infer --model TEACHER --val_dataset ROWS",
        )
