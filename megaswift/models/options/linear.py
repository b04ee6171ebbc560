"""The axes of the native engine for models with gated delta nets, each passed or refused. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megaswift.config.rule import Test
from megaswift.config.sections import Sections
from megaswift.errors import Problem
from megaswift.options.values import option_value_text


@dataclass(frozen=True)
class BlockAxis:
    """An axis of a run, and what a block of layers does on it."""

    axis: str
    """As the documentation calls it."""
    refused: str = ""
    """Why it is refused; empty: it passes."""
    option: str = ""
    """The option that asks for a refused axis."""
    asked: Test | None = None
    """Whether a run asks for it; None: `option` is refused elsewhere, for reasons of several blocks."""
    fix: str = "leave it out"
    condition: str = ""
    """Where it passes."""


PREFIX_SHARING = BlockAxis(
    "prefix sharing",
    "is not supported with gated delta nets: completions would have to start from the state after their prompt",
    "prefix_sharing",
)
GATED_DELTA_NET: tuple[BlockAxis, ...] = (
    BlockAxis("tensor parallelism", condition="tp x cp divides the key heads"),
    BlockAxis("sequence parallelism"),
    BlockAxis("pipeline and virtual pipeline"),
    BlockAxis("context parallelism", condition="by exchange of heads: tp x cp divides the key heads"),
    BlockAxis("data parallelism, distributed optimizer"),
    BlockAxis("expert and expert tensor parallelism"),
    BlockAxis("packed rows"),
    BlockAxis("recomputation, full and selective", condition="selective: by `--recompute_modules core_attn`"),
    BlockAxis("Transformer Engine's layers"),
    BlockAxis("LoRA"),
    BlockAxis(
        "QLoRA",
        "has no NF4 weights for gated delta nets",
        "train_type",
        lambda c: c.model.train_type == "qlora",
        "--train_type lora",
    ),
    BlockAxis(
        "FP8",
        "is not supported with gated delta nets, whose projections were not compared in FP8",
        "fp8_format",
        lambda c: c.model.fp8_format is not None,
    ),
    BlockAxis(
        "CUDA graphs",
        "is not supported with gated delta nets, whose layers were not captured yet",
        "cuda_graph_impl",
        lambda c: c.model.uses_cuda_graphs,
        "--cuda_graph_impl none",
    ),
    PREFIX_SHARING,
    BlockAxis("`--fit`"),
)
BLOCKS = {"gated delta nets": GATED_DELTA_NET}
"""Columns of the table in docs/families.md."""


def linear_layer_problems(c: Sections) -> Iterator[Problem]:
    """Report what a run on the native engine asks for that models with gated delta nets do not have."""
    for row in GATED_DELTA_NET:
        if row.asked is not None and row.asked(c):
            given = option_value_text(c.value(row.option))
            yield Problem(f"--{row.option} {given}", row.refused, row.fix)
