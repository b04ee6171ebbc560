"""The modules and parameters that an adapter folder's settings name, by PEFT's rules: read from a folder that holds
tensors for each of them, and chosen for a folder that PEFT shall load.

transformers 5 keeps all experts of a layer in two parameters. PEFT (0.21) takes names of experts' modules for these
parameters in some families and for nothing in others, and where it does, no other module of such a name (a shared
expert's, a dense layer's) has an adapter any longer: it drops those in silence. So a folder names parameters, those
modules' weights among them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megaswift.bridge.adapters.expert_stacks import target_parameter_of_expert_module
from megaswift.bridge.adapters.plan import AdapterPlan, ModuleAdapterSpec, pattern_value_for_module
from megaswift.models.targets import (
    ALL,
    WEIGHT,
    Projection,
    expert_leaves,
    expert_stack_name_without_layer,
    is_expert,
    projections,
)

_LAYER = re.compile(r".*?\.[^.]*\.(?P<number>\d+)\.")


@dataclass(frozen=True)
class PeftTargets:
    """Fields of adapter_config.json that say where adapters are, and ranks and alphas that differ there."""

    modules: list[str]
    """target_modules."""
    parameters: list[str]
    """target_parameters."""
    ranks: dict[str, int]
    """rank_pattern."""
    alphas: dict[str, float]
    """alpha_pattern."""


def targets_of_plan(plan: AdapterPlan) -> PeftTargets:
    """Return what PEFT has to be told to find every adapter of a plan."""
    s = plan.settings
    every = list(projections(plan.plan.family, plan.plan.spec))
    parameters = {} if s.dora else _parameters(every, expert_leaves(plan.plan.family))  # PEFT has no DoRA of these
    adapted = {a.module for a in plan.adapters}
    partly = {name for module, name in parameters.items() if module not in adapted}
    by_parameter: dict[str, list[ModuleAdapterSpec]] = {}
    modules: list[ModuleAdapterSpec] = []
    for adapter in plan.adapters:
        name = parameters.get(adapter.module)
        own = modules if name is None or name in partly else by_parameter.setdefault(name, [])
        own.append(adapter)
    values = {name: _rank_and_alpha(adapters, s.rslora) for name, adapters in by_parameter.items()}
    names = _without_layers(values, parameters.values())
    leaf_of = {a.module: a.projection.leaf for a in modules}
    same_leaf = {p.module for p in every if p.leaf in leaf_of.values() and parameters.get(p.module) not in values}
    ranks = {names[name]: rank for name, (rank, _) in values.items() if rank != s.rank}
    alphas = {names[name]: alpha for name, (_, alpha) in values.items() if alpha != s.alpha}
    return PeftTargets(
        sorted(set(leaf_of.values()) if same_leaf == leaf_of.keys() else leaf_of),
        sorted(set(names.values())),
        ranks | {a.module: a.rank for a in modules if a.rank != s.rank},
        alphas | {a.module: alpha for a in modules if (alpha := _rank_and_alpha([a], s.rslora)[1]) != s.alpha},
    )


def _parameters(every: Collection[Projection], leaves: Collection[str]) -> dict[str, str]:
    """The parameter by which PEFT finds a projection, by module, where that is not its module: experts, and modules
    that are called as one of the family's, which `leaves` has."""
    experts = {p.module: p.stack or target_parameter_of_expert_module(p.module) for p in every if is_expert(p)}
    return experts | {p.module: p.module + WEIGHT for p in every if not is_expert(p) and p.leaf in leaves}


def _rank_and_alpha(adapters: list[ModuleAdapterSpec], rslora: bool) -> tuple[int, float]:
    """PEFT joins the adapters of an expert's gate and up: their ranks add up, their scale stays."""
    rank = sum(a.rank for a in adapters if a.entry.expert == adapters[0].entry.expert)
    alpha = adapters[0].scale * (math.sqrt(rank) if rslora else rank)
    return rank, float(f"{alpha:.12g}")


def alphas_of_modules(
    patterns: Mapping[str, float], default: float, ranks: Mapping[str, int], rslora: bool
) -> dict[str, float]:
    """Return the alphas that differ from the default, by module, where tensors stand module by module: a pattern may
    name a parameter, as `targets_of_plan` has it.

    Args:
        patterns: alpha_pattern.
        ranks: The adapters', by module.
    """
    together: dict[str, int] = {}
    for module, rank in ranks.items():
        together[_expert_parameter(module)] = together.get(_expert_parameter(module), 0) + rank
    found = {}
    for module, rank in ranks.items():
        alpha = pattern_value_for_module(patterns, module, None)
        if alpha is None and ".experts." in module:
            alpha = pattern_value_for_module(patterns, target_parameter_of_expert_module(module), None)
            share = rank / together[_expert_parameter(module)]
            alpha = None if alpha is None else alpha * (math.sqrt(share) if rslora else share)
        elif alpha is None:
            alpha = pattern_value_for_module(patterns, module + WEIGHT, None)
        if alpha is not None and not math.isclose(alpha, default):
            found[module] = alpha
    return found


def _expert_parameter(module: str) -> str:
    """An expert's part of a parameter."""
    home, _, rest = module.partition(".experts.")
    return f"{home}.{rest.partition('.')[0]}.{target_parameter_of_expert_module(module)}" if rest else module


def _without_layers(values: Mapping[str, tuple[int, float]], every: Collection[str]) -> dict[str, str]:
    """Parameters' names without their layers where all layers' have the same adapters, else whole names."""
    names = {}
    for name in values:
        end = expert_stack_name_without_layer(name)
        alike = {values.get(other) for other in every if expert_stack_name_without_layer(other) == end}
        names[name] = end if len(alike) == 1 else name
    return names


def targeted_modules(
    config: Mapping[str, Any], known: Mapping[str, Projection], stored: Collection[str]
) -> Iterator[str]:
    """Return the modules of a model that should have an adapter.

    Args:
        config: adapter_config.json.
        known: The model's projections, by module.
        stored: Modules that have one. Whether a name means experts depends on how transformers' version keeps them, so
            experts count only where others of the same name have an adapter.
    """
    experts = {known[module].leaf for module in stored if is_expert(known[module])}
    parameters = config.get("target_parameters") or ()
    for module, projection in known.items():
        if not is_expert(projection):
            if is_target(config, module) or _named(module + WEIGHT, parameters):
                yield module
        elif projection.leaf in experts:
            parameter = projection.stack or target_parameter_of_expert_module(module)
            if is_target(config, module) or _named(parameter, parameters):
                yield module


def is_target(config: Mapping[str, Any], module: str) -> bool:
    """Return whether `target_modules` names a module: by its whole name or the end of it, or by a regular
    expression."""
    targets = config.get("target_modules") or ()
    if _matches(module, config.get("exclude_modules") or ()):
        return False
    if targets == ALL or isinstance(targets, str) or module in targets:
        return targets == ALL or _matches(module, targets)
    return _named(module, targets) and _in_layers(config, module)


def _matches(module: str, names: str | Collection[str]) -> bool:
    if not isinstance(names, str):
        return _named(module, names)
    try:
        return re.fullmatch(names, module) is not None
    except re.error:
        return False


def _named(module: str, names: Collection[str]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _in_layers(config: Mapping[str, Any], module: str) -> bool:
    """Whether `layers_to_transform`, if there is one, has the module's layer."""
    layers = config.get("layers_to_transform")
    if layers is None or layers == []:
        return True
    patterns = config.get("layers_pattern") or ()
    patterns = [patterns] if isinstance(patterns, str) else patterns
    matches = [re.match(rf"(?:^|.*?\.){pattern}\.(?P<number>\d+)\.", module) for pattern in patterns]
    match = next(filter(None, matches), None) if patterns else _LAYER.match(module)
    return match is not None and int(match["number"]) in (layers if isinstance(layers, list) else [layers])
