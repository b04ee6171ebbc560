"""Encoders: options that they do not have, and defaults that their own files give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megaswift.config import SwiftConfig
from megaswift.engine.options.engine_checks import AXES, NATIVE, is_engine_open, requested_engine
from megaswift.errors import Problem, UserError
from megaswift.folders.embedding_files import read_embedding_files
from megaswift.folders.source import locate_model
from megaswift.models.encoders import ENCODER_TASKS, encoder_of
from megaswift.models.family import read_config_json

ENGINES = "ddp, zero1 to zero3 and fsdp2"


def encoder_problems(cfg: SwiftConfig, config: Mapping[str, Any]) -> list[Problem]:
    """Report a task that an encoder cannot be trained for, and options that encoders do not have. `config`: the
    config.json of the run's model."""
    encoder = encoder_of(config)
    if encoder is None:
        return []
    model = f"--model {cfg.model.model}"
    kind = f"an encoder (model_type {encoder.model_type})"
    if cfg.task not in ENCODER_TASKS:
        *tasks, last = ENCODER_TASKS
        rule = f"is {kind}, which writes no text; it can be trained by --task_type {', '.join(tasks)} or {last}"
        return [Problem(model, rule, f"use a language model for {cfg.task}")]
    problems = []
    if requested_engine(cfg) == NATIVE and not is_engine_open(cfg):
        axes = [f"--{name} {cfg.value(name)}" for name in AXES if cfg.value(name) > 1]
        rule = f"needs the native engine, which has no encoders (model_type {encoder.model_type}); {ENGINES} have"
        if not axes:
            rule = f"has no encoders (model_type {encoder.model_type}); {ENGINES} have"
        problems.append(Problem((axes or ["--engine megatron"])[0], rule, "leave it out"))
    for name in ("packing", "padding_free"):
        if cfg.value(name):
            rule = f"is not for encoders: {model} is {kind}, whose tokens see their whole row"
            problems.append(Problem(f"--{name} true", rule, "leave it out"))
    if cfg.data.truncation_strategy == "left":
        rule = f"would cut the token at the beginning that {kind} reads ({model})"
        problems.append(Problem("--truncation_strategy left", rule, "--truncation_strategy right"))
    for name in ("reranker_template", "reranker_instruction"):
        if cfg.task == "reranker" and cfg.value(name) is not None:
            rule = f"is not for encoders: {model} is {kind}, which reads a query and a document as a pair"
            problems.append(Problem(f"--{name}", rule, "leave it out"))
    if encoder.longest is not None and cfg.data.max_length > encoder.longest:
        rule = f"exceeds the longest text of this model ({encoder.model_type}), {encoder.longest} tokens"
        problems.append(Problem(f"--max_length {cfg.data.max_length}", rule, f"--max_length {encoder.longest}"))
    return problems


def with_encoder_defaults(cfg: SwiftConfig) -> SwiftConfig:
    """Return the options of a run that trains an encoder with the model's own limit as `max_length`, at which texts are
    cut, unless options say otherwise; those of other runs as they are."""
    if cfg.task not in ENCODER_TASKS or {"max_length", "truncation_strategy"} <= cfg.given:
        return cfg
    try:
        folder = locate_model(cfg.model, weights=False)
        encoder = encoder_of(read_config_json(folder))
        if encoder is None:
            return cfg
        files = read_embedding_files(folder, "--model") if cfg.task == "embedding" else None
    except UserError:  # preflight reports it with all other problems
        return cfg
    limits = [encoder.longest, None if files is None else files.max_length]
    known = [limit for limit in limits if limit is not None]
    values: dict[str, Any] = {}
    if "max_length" not in cfg.given and known:
        values["max_length"] = min(known)
    if "truncation_strategy" not in cfg.given:
        values["truncation_strategy"] = "right"
    return cfg.replace(**values)
