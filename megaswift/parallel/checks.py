"""Wrong layouts, refused before any process group: all mistakes at once, and the nearest layout that works.

Owns how mistakes are collected and the search; the rules themselves are in `rules.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from math import log2
from typing import Any

from megaswift.config.swift import SwiftConfig
from megaswift.errors import LayoutError, Problem
from megaswift.log import count_text
from megaswift.parallel.layout import FLAGS, Layout
from megaswift.parallel.layout_rules import LayoutRequest, broken_rules
from megaswift.parallel.model_shape import ModelShape
from megaswift.parallel.pipeline_split import PipelineSplit, divisors

ALONE = ("tp", "cp", "ep", "etp")
"""Axes whose size is ruled out, whatever the others are, when it does not work with all others at 1."""


def layout_for(cfg: SwiftConfig, shape: ModelShape, world_size: int) -> Layout:
    """The layout of a run; LayoutError with everything that is wrong with it."""
    asked = LayoutRequest.from_config(cfg, world_size)
    problems = check_layout(shape, asked)
    if problems:
        raise LayoutError(problems)
    return asked.layout


def check_layout(shape: ModelShape, asked: LayoutRequest) -> list[Problem]:
    """All that is wrong; the last entry also names the nearest layout that works."""
    problems = list(dict.fromkeys(broken_rules(shape, asked)))
    if problems:
        near = nearest_layout(shape, asked)
        if near is not None:
            last = problems[-1]
            processes = count_text(asked.world_size, "process")
            text = f"nearest layout that works on {processes}: {describe_layout(near, asked)}"
            problems[-1] = replace(last, fix="\n         ".join(filter(None, (last.fix, text))))
    return problems


def nearest_layout(shape: ModelShape, asked: LayoutRequest) -> LayoutRequest | None:
    """The legal layout on as many processes with the fewest changed settings, then the smallest change of sizes (as
    ratios).

    The model, the sequence length and the batch sizes stay as they are. None when no layout goes with these."""
    options = _options(shape, asked)
    hopeless = {axis for axis in ALONE if axis in options and not _alone(shape, asked, axis, asked.axes[axis])}
    for changes in range(len(hopeless), len(options) + 1):
        choices = [names for names in combinations(options, changes) if hopeless <= set(names)]
        found = [a for names in choices for a in _variants(asked, options, names) if _works(shape, a)]
        if found:
            return min(found, key=lambda a: (_distance(a, asked), -a.tp * a.pp * a.cp))
    return None


def describe_layout(near: LayoutRequest, asked: LayoutRequest) -> str:
    """The flags of a layout: those that are not 1, and those that differ from what was asked."""
    parts = [f"{FLAGS[axis]} {size}" for axis, size in near.axes.items() if size > 1 or size != asked.axes[axis]]
    if near.split != PipelineSplit():
        ends = {
            "--first_stage_layers": near.split.first,
            "--last_stage_layers": near.split.last,
            "--pipeline_layout": near.split.custom,
        }
        parts += [f"{flag} {value}" for flag, value in ends.items() if value is not None]
    if near.sequence_parallel is not None:
        parts.append(f"--sequence_parallel {str(near.sequence_parallel).lower()}")
    if near.cp > 1 and near.cp_comm_type != "p2p":
        parts.append(f"--cp_comm_type {near.cp_comm_type}")
    return " ".join(parts or ["none of these flags"]) + f" (data parallel: {near.known_dp})"


def _alone(shape: ModelShape, asked: LayoutRequest, axis: str, size: int) -> bool:
    change: dict[str, Any] = {axis: size}
    return _works(shape, replace(LayoutRequest(asked.world_size, max_length=asked.max_length), **change))


def _options(shape: ModelShape, asked: LayoutRequest) -> dict[str, list[Any]]:
    """For each setting the values to try instead of the one asked for."""
    world = divisors(asked.world_size)
    options: dict[str, list[Any]] = {axis: [n for n in world if _alone(shape, asked, axis, n)] for axis in ALONE}
    options["pp"] = [
        n for n in world if n <= shape.num_layers and (asked.split != PipelineSplit() or shape.num_layers % n == 0)
    ]
    options["vpp"] = divisors(shape.num_layers)
    options["split"] = [PipelineSplit()]
    options["sequence_parallel"] = [None]
    options["cp_comm_type"] = ["p2p"]
    others = {name: [v for v in values if v != getattr(asked, name)] for name, values in options.items()}
    return {name: values for name, values in others.items() if values}


def _variants(asked: LayoutRequest, options: dict[str, list[Any]], names: tuple[str, ...]) -> Iterator[LayoutRequest]:
    for values in product(*(options[name] for name in names)):
        changed = dict(zip(names, values, strict=True))
        sizes = {**asked.axes, **changed}
        if asked.world_size % max(1, sizes["tp"] * sizes["pp"] * sizes["cp"]) == 0 and (
            sizes["pp"] > 1 or sizes["vpp"] == 1
        ):
            yield replace(asked, dp=None, **changed)


def _works(shape: ModelShape, asked: LayoutRequest) -> bool:
    return next(broken_rules(shape, asked), None) is None


def _distance(near: LayoutRequest, asked: LayoutRequest) -> float:
    sizes = sum(abs(log2(near.axes[axis] / max(1, size))) for axis, size in asked.axes.items())
    return sizes + (asked.dp is not None and near.known_dp != asked.dp) / 2
