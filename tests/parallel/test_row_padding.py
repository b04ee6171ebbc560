"""Lengths of rows: multiples that layouts and FP8 products need, and rows of one length."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from megaswift.config import SwiftConfig
from megaswift.data.batches.collate import Document, PaddingShape
from megaswift.data.batches.loader import collate_step_microbatches
from megaswift.parallel.layout import Layout
from megaswift.parallel.row_padding import (
    fp8_token_multiple,
    full_microbatch_tokens,
    needs_rows_of_full_length,
    row_padding_multiple,
)

FP8: list[tuple[dict[str, Any], int]] = [
    ({}, 1),
    ({"fp8_format": "hybrid"}, 16),
    ({"fp8_format": "e4m3", "fp8_recipe": "tensorwise"}, 16),
    ({"fp8_format": "e4m3", "fp8_recipe": "blockwise"}, 16),
    ({"fp8_format": "e4m3", "fp8_recipe": "mxfp8"}, 32),
]
LAYOUTS = [
    Layout(1),
    Layout(2, tp=2),
    Layout(2, tp=2, sequence_parallel=True),
    Layout(2, cp=2),
    Layout(8, tp=2, cp=4, sequence_parallel=True),
]


@pytest.mark.parametrize(("options", "tokens"), FP8)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rows_divide_as_the_layout_and_fp8_products_need(options: dict[str, Any], tokens: int, layout: Layout) -> None:
    n = row_padding_multiple(layout, fp8_token_multiple(SwiftConfig(**options).model))
    parts = layout.tp if layout.sequence_parallel else 1
    assert layout.cp == 1 or n % (2 * layout.cp) == 0
    assert n % (layout.cp * parts * tokens) == 0
    assert n <= 2 * layout.cp * parts * tokens  # no more padding than that


def test_the_recipes_multiples_are_megatrons(megatron: Any) -> None:
    enums, utils = (importlib.import_module(f"{megatron.__name__}.{name}") for name in ("enums", "fp8_utils"))
    for options, tokens in FP8[1:]:
        recipe = enums.Fp8Recipe[SwiftConfig(**options).model.fp8_recipe]
        assert utils.get_fp8_align_size(recipe) == tokens


def test_blocks_that_ranks_gather() -> None:
    """Under sequence parallelism each rank's tokens are whole blocks."""
    model = SwiftConfig(fp8_format="e4m3", fp8_recipe="blockwise").model
    assert (fp8_token_multiple(model), fp8_token_multiple(model, sequence_parallel=True)) == (16, 128)
    layout = Layout(4, tp=2, cp=2, sequence_parallel=True)
    assert row_padding_multiple(layout, fp8_token_multiple(model, True)) % (128 * 2 * 2) == 0


def test_who_needs_rows_of_full_length() -> None:
    """Ranks that exchange padded inputs of experts, beside buffers and graphs; experts of one rank do not."""
    padded = SwiftConfig(moe_pad_expert_input_to_capacity=True, moe_expert_capacity_factor=1.0).model
    assert needs_rows_of_full_length(padded, False, Layout(2, ep=2))
    assert not needs_rows_of_full_length(padded, False, Layout(2))
    assert not needs_rows_of_full_length(SwiftConfig(moe_expert_capacity_factor=1.0).model, False, Layout(2, ep=2))
    assert needs_rows_of_full_length(SwiftConfig(cuda_graph_impl="local").model, False, Layout(1))
    plain = SwiftConfig().model
    assert needs_rows_of_full_length(plain, True, Layout(2, tp=2)) and not needs_rows_of_full_length(
        plain, True, Layout(2)
    )


@pytest.mark.parametrize("packing", [False, True])
def test_micro_batches_of_full_length(packing: bool) -> None:
    """As many tokens as the rows that the collator pads to max_length, whatever the documents."""
    layout = Layout(4, tp=2, cp=2, sequence_parallel=True)
    shape = PaddingShape(4, row_padding_multiple(layout, 1), minimum=50)
    documents = [(np.arange(n, dtype=np.int32), np.ones(n, dtype=np.uint8), n) for n in (7, 50, 23, 9)]
    steps: list[list[list[list[Document]]]] = [[[[d] for d in documents[:3]]], [[documents[3:], [], []]]]
    for rows in steps:
        (batch,) = collate_step_microbatches(rows, packing, shape, False)
        assert batch.input_ids.numel() == layout.cp * full_microbatch_tokens(3, 50, shape.row_multiple, layout)
