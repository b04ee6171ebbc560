"""A trace against Hugging Face or another trace: the reference's step, five perturbed ones, the comparison."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from megaswift.bisection.compare import RUNS, Comparison, compare, inputs_of
from megaswift.bisection.joined import joined_step
from megaswift.bisection.placement import Placement, plan_entry
from megaswift.bisection.reference import HuggingFaceStep, Recipe, ReferenceStep
from megaswift.bisection.trace_folder import OF_PARAMETERS, OUTPUT, Trace
from megaswift.bridge.plan import WeightPlan
from megaswift.config import SwiftConfig
from megaswift.errors import Problem, UserError
from megaswift.families import family_of
from megaswift.models.family import read_config_json
from megaswift.models.spec import ModelSpec


def recipe_of(cfg: SwiftConfig, spec: ModelSpec, lr: float) -> Recipe:
    """Return what the reference's step is taken by."""
    o = cfg.optim
    default = spec.transformer.get("moe_aux_loss_coeff") or 0.0
    aux = default if cfg.model.moe_aux_loss_coeff is None else cfg.model.moe_aux_loss_coeff
    sigmoid = spec.transformer.get("moe_router_score_function") == "sigmoid"
    return Recipe(
        optimizer=o.optimizer,
        lr=lr,
        weight_decay=o.weight_decay,
        eps=o.adam_epsilon,
        max_grad_norm=o.max_grad_norm,
        label_smoothing=cfg.train.label_smoothing_factor,
        aux_coeff=aux if spec.experts else 0.0,
        z_coeff=(cfg.model.moe_z_loss_coeff or 0.0) if spec.experts else 0.0,
        sigmoid=sigmoid,
        biased=not sigmoid and bool(spec.transformer.get("moe_router_enable_expert_bias")),
    )


@dataclass(frozen=True)
class References:
    """The reference's step, and those from perturbed weights."""

    base: ReferenceStep
    perturbed: Iterable[ReferenceStep]
    """Each is computed when it is asked for, once: a large model's do not fit memory together."""


def placement_of(trace: Trace, model: Path) -> Placement:
    """Return what the ranks of a trace hold of the model in a folder."""
    config = read_config_json(model)
    spec = family_of(config).spec(config)
    return Placement(WeightPlan(family_of(config), spec), spec, trace.layout)


def references_of(trace: Trace, model: Path, cfg: SwiftConfig) -> References:
    """Take the Hugging Face model's steps on the rows of a trace."""
    placement = placement_of(trace, model)
    names: set[str] = set()
    trained: set[str] = set()
    for rank in trace.ranks():
        for entry in rank.tensors:
            if entry.kind == OUTPUT:
                names.add(entry.name)
            elif entry.kind in OF_PARAMETERS and (found := plan_entry(placement.plan, entry.name)) is not None:
                trained.update(found.hf)
    recipe = recipe_of(cfg, placement.spec, trace.about.get("lr", cfg.optim.learning_rate))
    reference = HuggingFaceStep(model, placement.plan, getattr(torch, trace.about["dtype"]), recipe)
    rows = inputs_of(trace)
    base = reference.run(rows, names, trained)
    return References(base, (reference.run(rows, names, trained, seed) for seed in range(RUNS)))


def judge(folder: Path, model: Path, cfg: SwiftConfig, other: Path | None = None) -> Comparison:
    """Compare a trace with the Hugging Face model on the same rows, or with another trace.

    Args:
        folder: The trace.
        model: The Hugging Face folder from whose weights its step began.
        cfg: The configuration of the run: optimizer and coefficients of auxiliary losses.
        other: Another trace to compare with, whose rows are the same.
    """
    trace = Trace.open(folder)
    steps = references_of(trace, model, cfg)
    placement = placement_of(trace, model)
    if other is None:
        return compare(trace, placement, steps.base, steps.perturbed)
    against = Trace.open(other)
    _check_same_rows(trace, against)
    joined = joined_step(against, placement_of(against, model), steps.base)
    return compare(trace, placement, joined, steps.perturbed, center=steps.base)


def _check_same_rows(trace: Trace, other: Trace) -> None:
    """Raise a UserError where two traces are of other rows, or of rows that are padded otherwise."""
    own = inputs_of(trace)
    others = inputs_of(other)
    for number, fields in own.items():
        theirs = others.get(number, {})
        same = fields.keys() == theirs.keys() and all(torch.equal(theirs[name], fields[name]) for name in fields)
        if not same:
            rule = (
                f"has other rows than the run, or pads them otherwise: micro-batch {number[1]} of replica {number[0]}"
            )
            raise UserError(Problem(str(other.folder), rule, "compare each with --against hf"))
