"""A trace against Hugging Face or another trace: the reference's step, five perturbed ones, the comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megaswift.bisection.compare import RUNS, Comparison, compare, inputs_of
from megaswift.bisection.joined import joined_parameters, joined_step, laid_out
from megaswift.bisection.placement import Placement
from megaswift.bisection.reference import HuggingFaceStep, Recipe, ReferenceStep, neighbours
from megaswift.bisection.trace_folder import CLIPPED, GATHERED, GRADIENT, OF_PARAMETERS, OUTPUT, WEIGHT, Trace
from megaswift.bridge.adapters.folder import PeftFolder
from megaswift.bridge.plan import WeightPlan
from megaswift.config import SwiftConfig
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
        ahead_weight=cfg.model.mtp_loss_scaling_factor,
        ahead_detached=cfg.model.mtp_detach_heads,
        biased=not sigmoid and bool(spec.transformer.get("moe_router_enable_expert_bias")),
        lora_plus=o.lorap_lr_ratio or 1.0,
    )


@dataclass(frozen=True)
class References:
    """The reference's step, and those from perturbed weights."""

    recipe: Recipe
    dtype: torch.dtype
    base: ReferenceStep
    perturbed: Iterable[ReferenceStep]
    """Each is computed when it is asked for, once: a large model's do not fit memory together."""


def placement_of(trace: Trace, model: Path) -> Placement:
    """Return what the ranks of a trace hold of the model in a folder."""
    config = read_config_json(model)
    spec = family_of(config).spec(config)
    spec = replace(spec, features=replace(spec.features, mtp_layers=trace.about.get("mtp_layers", 0)))
    plan = WeightPlan(family_of(config), spec)
    adapters = None if trace.adapter is None else PeftFolder(trace.adapter).plan(plan, training=True)
    return Placement(plan, spec, trace.layout, adapters)


def references_of(trace: Trace, model: Path, cfg: SwiftConfig) -> References:
    """Take the Hugging Face model's steps on the rows of a trace."""
    placement = placement_of(trace, model)
    names: set[str] = set()
    trained: set[str] = set()
    for rank in trace.ranks():
        for entry in rank.tensors:
            if entry.kind == OUTPUT:
                names.add(entry.name)
            elif entry.kind in OF_PARAMETERS and (found := placement.parameter(entry.name)) is not None:
                trained.update(found.hf)
    recipe = recipe_of(cfg, placement.spec, trace.about.get("lr", cfg.optim.learning_rate))
    dtype = getattr(torch, trace.about["dtype"])
    reference = HuggingFaceStep(model, placement.plan, dtype, recipe, trace.adapter)
    rows = inputs_of(trace)
    base = reference.run(rows, names, trained)
    perturbed = (reference.run(rows, names, trained, seed) for seed in range(RUNS))
    return References(recipe, dtype, base, perturbed)


def judge(trace: Trace, model: Path, cfg: SwiftConfig, other: Trace | None = None) -> Comparison:
    """Compare a trace with the Hugging Face model on the same rows, or with another trace.

    Args:
        trace: The trace of a run.
        model: The Hugging Face folder from whose weights its step began.
        cfg: The configuration of the run: optimizer and coefficients of auxiliary losses.
        other: Another trace to compare with, of the same documents in any micro-batches.

    Raises:
        UserError: The other trace has other documents.
    """
    steps = references_of(trace, model, cfg)
    return compare_with(trace, model, steps, None if other is None else other_step(trace, other, model, steps))


def other_step(trace: Trace, other: Trace, model: Path, steps: References) -> ReferenceStep:
    """Return what another trace recorded as a step on the rows of this one."""
    joined = joined_step(other, placement_of(other, model), steps.base)
    return laid_out(joined, inputs_of(other), inputs_of(trace))


def compare_with(trace: Trace, model: Path, steps: References, other: ReferenceStep | None = None) -> Comparison:
    """Compare a trace with steps that have been taken, or with `other` within the tolerances that follow from them."""
    placement = placement_of(trace, model)
    own = joined_parameters(trace, placement, (CLIPPED, WEIGHT))
    if CLIPPED not in own:
        gradients = joined_parameters(trace, placement, (GRADIENT,)).get(GRADIENT, {})
        clipping = steps.recipe.clipping(gradients.values())
        own[CLIPPED] = {name: g * clipping for name, g in gradients.items()}
    base = with_own_gradients(steps.base, own, steps)
    perturbed = (with_own_gradients(step, own, steps, seed) for seed, step in enumerate(steps.perturbed))
    if other is None:
        return compare(trace, placement, base, perturbed)
    other.parameters |= {kind: base.parameters[kind] for kind in (WEIGHT, GATHERED)}
    return compare(trace, placement, other, perturbed, center=base)


def with_own_gradients(
    step: ReferenceStep, own: Mapping[str, Mapping[str, Tensor]], steps: References, seed: int | None = None
) -> ReferenceStep:
    """Take the optimizer's step with the clipped gradients of the run itself.

    Adam divides a gradient by its size: rounding that turns the sign of a gradient near 0 would move a weight by twice
    the learning rate. Wrong gradients are seen as such; here the optimizer alone is compared, then what the model has
    of the optimizer's weights.

    Args:
        step: The reference's step, before the optimizer's.
        own: The run's tensors of parameters, whole.
        steps: The recipe and the run's dtype.
        seed: For a perturbed step: numbers are first moved to their neighbours.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)

    def moved(tensor: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return (tensor if generator is None else neighbours(tensor.to(dtype), generator)).double()

    known = steps.recipe.optimizer in ("adam", "sgd")
    updated = {
        name: steps.recipe.updated(name, moved(steps.base.start[name]), moved(gradient)).float()
        for name, gradient in own[CLIPPED].items()
        if known and name in steps.base.start
    }
    gathered = {name: moved(weight, steps.dtype).float() for name, weight in own.get(WEIGHT, {}).items()}
    return replace(step, parameters={**step.parameters, WEIGHT: updated, GATHERED: gathered})
