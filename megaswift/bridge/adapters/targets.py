"""The modules that an adapter folder's settings name, by PEFT's rules: a folder holds tensors for each of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from megaswift.bridge.adapters.expert_stacks import target_parameter_of_expert_module
from megaswift.models.targets import ALL, Projection

_LAYER = re.compile(r".*?\.[^.]*\.(?P<number>\d+)\.")


def targeted_modules(
    config: Mapping[str, Any], projections: Mapping[str, Projection], stored: Collection[str]
) -> Iterator[str]:
    """Return the modules of a model that should have an adapter.

    Args:
        config: adapter_config.json.
        projections: The model's, by module.
        stored: Modules that have one. Whether a name means experts depends on how transformers' version keeps them, so
            experts count only where others of the same name have an adapter.
    """
    experts = {projections[module].leaf for module in stored if _is_expert(projections[module])}
    for module, projection in projections.items():
        if not _is_expert(projection):
            if is_target(config, module):
                yield module
        elif projection.leaf in experts:
            parameter = projection.stack or target_parameter_of_expert_module(module)
            if is_target(config, module) or _named(parameter, config.get("target_parameters") or ()):
                yield module


def _is_expert(projection: Projection) -> bool:
    return ".experts." in projection.megatron


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
