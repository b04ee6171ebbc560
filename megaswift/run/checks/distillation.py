"""Checks of a teacher before a run: its configuration, its files, its tokenizer, its layout."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megaswift.bridge.adapters.options.checks import SHARDED
from megaswift.config import SwiftConfig
from megaswift.engine.options.engine_checks import NATIVE, requested_engine
from megaswift.errors import Problem, UserError
from megaswift.folders.source import locate_model, missing_model_file_problems
from megaswift.models.spec import ModelSpec
from megaswift.options.tasks import DISTILLATION
from megaswift.parallel.checks import layout_problems
from megaswift.parallel.constraints import LayoutRequest
from megaswift.parallel.layout import Layout
from megaswift.parallel.model_shape import ModelShape
from megaswift.run.checks.model_spec import model_spec_for_task
from megaswift.trainers.distillation.index import (
    has_teacher_logits,
    not_a_new_folder_problem,
    other_numbers_problems,
    read_index,
)


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
    if cfg.distillation.teacher_model is None or requested_engine(cfg) != NATIVE:
        return None
    return Layout.from_config(teacher_config(cfg).parallel, world_size)


def teacher_problems(cfg: SwiftConfig, world_size: int) -> list[Problem]:
    """Report a teacher that is missing, does not fit the ranks, or reads tokens of another tokenizer."""
    if cfg.task not in DISTILLATION and cfg.distillation.teacher_model is None:
        return []
    options = cfg.distillation
    if options.teacher_model_server is not None:
        return server_problems(options.teacher_model_server)
    if options.teacher_logits is not None:
        folder = Path(options.teacher_logits).expanduser()
        if has_teacher_logits(folder):
            temperature = cfg.rollout.temperature
            return [
                *other_numbers_problems(
                    folder, read_index(folder), options.teacher_model, temperature, options.gkd_logits_topk
                )
            ]
        if options.teacher_model is None:
            rule = "has no probabilities of a teacher yet"
            fix = "give --teacher_model too, to write them"
            return [Problem(f"--teacher_logits {options.teacher_logits}", rule, fix)]
        problem = not_a_new_folder_problem(folder)
        if problem is not None:
            return [problem]
    if options.teacher_model is None:
        rule = f"is missing: {cfg.task} learns from a teacher"
        return [Problem("teacher_model", rule, "--teacher_model DIR, or --teacher_model_server URL")]
    return _model_problems(cfg, world_size)


def server_problems(url: str) -> list[Problem]:
    """Report a server's address that is none."""
    label = f"--teacher_model_server {url}"
    parts = urlsplit(url)
    if url.lstrip().startswith(("[", "{")):
        return [Problem(label, "lists several teachers, but a run has one", "--teacher_model_server http://HOST:8000")]
    if parts.scheme not in ("http", "https") or not parts.netloc:
        return [Problem(label, "is not a URL", "--teacher_model_server http://127.0.0.1:8000")]
    return []


def _model_problems(cfg: SwiftConfig, world_size: int) -> list[Problem]:
    teacher = teacher_config(cfg)
    folder, spec = locate_teacher(teacher, weights=False)
    label = f"--teacher_model {teacher.model.model}"
    if Path(str(teacher.model.model)).expanduser().is_dir():
        unfit = [*missing_model_file_problems(folder, False)]
        if unfit:
            return [replace(p, what=label, rule=f"{p.what} {p.rule}", fix=_without_model(p.fix)) for p in unfit]
    request = LayoutRequest.of(teacher.parallel, world_size, cfg.data.max_length, teacher.train)
    unfit = layout_problems(ModelShape.of(spec), request) if requested_engine(teacher) == NATIVE else []
    named = [replace(p, what=_teacher_option(p.what), fix=_teacher_option(p.fix)) for p in unfit]
    return named or [*tokenizer_problems(cfg, folder, spec)]


def locate_teacher(teacher: SwiftConfig, weights: bool = True) -> tuple[Path, ModelSpec]:
    """Return the folder and the model of a teacher's configuration.

    Args:
        teacher: What `teacher_config` returns.
        weights: Whether the weights are needed, besides the configuration and the tokenizer.

    Raises:
        UserError: There is no such model, or it cannot be used; the error names `--teacher_model`.
    """
    name = teacher.model.model
    try:
        folder = locate_model(teacher.model, weights=weights)
        return folder, model_spec_for_task(teacher, folder)
    except UserError as error:
        error.problems = [_of_teacher(problem, f"--teacher_model {name}") for problem in error.problems]
        error.args = (error.message(),)
        raise


def _of_teacher(problem: Problem, label: str) -> Problem:
    """A problem of a model, named as the teacher's."""
    if problem.what.startswith("--model "):
        return replace(problem, what=label, fix=_without_model(problem.fix))
    return replace(problem, what=label, rule=f"{problem.what} {problem.rule}")


def _without_model(fix: str) -> str:
    """A fix for a model, in the options of a teacher: adapters are merged first."""
    adapters = re.fullmatch(r"--model (.*) --adapters (.*)", fix)
    if adapters:
        base, folder = adapters.groups()
        merge = f"megaswift export --model {base} --adapters {folder} --merge_lora true --output_dir MERGED"
        return f"{merge}, then --teacher_model MERGED"
    return fix.replace("--model ", "--teacher_model ")


def _teacher_option(text: str) -> str:
    """The text with the options of the teacher's layout in place of the run's."""
    text = re.sub(r",? or --pipeline_layout '[^']*'", "", text)
    text = re.sub(r"(?<!\S)--(tp|pp|cp|ep)\b", r"--teacher_\1", text)
    return re.sub(r"\b(tensor|pipeline|context|expert)_parallel", r"teacher_\1_parallel", text)


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
