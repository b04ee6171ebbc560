"""Completions to micro-batches: each number stands where its token is the label, packed and not, and comes back from
there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megaswift.data.batches.collate import PaddingShape
from megaswift.data.prompts.collate import (
    RolloutCollator,
    RolloutMicrobatch,
    RolloutTokens,
    gather_completion_values,
    scatter_completion_values,
)
from megaswift.losses.document_segments import document_index


def completed(number: int, prompt: int, own: str, silent: bool = False) -> RolloutTokens:
    """`own`: a letter for each token after the prompt, x for the policy's. No token comes twice; `told` is the token,
    `odd` if it is."""
    written = [100 * (number + 1) + k for k in range(len(own))]
    mine = np.asarray([] if silent else [t for t, o in zip(written, own, strict=True) if o == "x"], dtype=np.float32)
    return RolloutTokens(
        number, [*range(5, 5 + prompt)], written, [o == "x" for o in own], {"told": mine, "odd": mine % 2 == 1}, silent
    )


PLAIN, TOOL, SHORT, SILENT = (
    completed(0, 3, "xxxx"),
    completed(1, 1, "xxttxtx"),
    completed(2, 4, "x"),
    completed(3, 2, "xxx", silent=True),
)
MICROS: list[RolloutMicrobatch] = [[PLAIN, TOOL], [SILENT, SHORT], [None, TOOL], [SILENT, None]]
SHAPE = PaddingShape(4, 8)


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_a_number_stands_where_its_token_is_the_label(packing: bool, uniform: bool) -> None:
    batches = RolloutCollator(SHAPE, packing, uniform).batches(MICROS)
    assert len({b.input_ids.shape[1] for b in batches} if uniform and not packing else {0}) == 1
    for batch, micro in zip(batches, MICROS, strict=True):
        at = batch.loss_weights != 0
        spoken = [c for c in micro if c is not None and not c.silent]
        assert batch.labels[at].tolist() == [t for c in spoken for t, o in zip(c.written, c.own, strict=True) if o]
        told, odd = batch.fields["told"], batch.fields["odd"]
        assert torch.equal(told, torch.where(at, batch.labels, 0).float()) and told.dtype == torch.float32
        assert torch.equal(odd, at & (batch.labels % 2 == 1)) and odd.dtype == torch.bool


@pytest.mark.parametrize("packing", [False, True])
def test_completions_are_documents_silent_ones_too_and_fillers_not(packing: bool) -> None:
    for batch, micro in zip(RolloutCollator(SHAPE, packing, False).batches(MICROS), MICROS, strict=True):
        numbers = batch.fields["completions"]
        held = [c for c in micro if c is not None]
        assert numbers.dtype == torch.int64 and len(numbers) == len(held)
        index = document_index(batch)
        for number, c in zip(numbers.tolist(), held, strict=True):
            inside = batch.input_ids[(index == number) & batch.valid].tolist()
            assert inside == [*c.prompt, *c.written]


@pytest.mark.parametrize("packing", [False, True])
def test_what_is_placed_is_taken_back(packing: bool) -> None:
    for batch, micro in zip(RolloutCollator(SHAPE, packing, False).batches(MICROS), MICROS, strict=True):
        back = gather_completion_values(batch, batch.fields["told"], micro)
        assert [*back] == [c.number for c in micro if c is not None and not c.silent]
        for c in micro:
            if c is not None and not c.silent:
                assert back[c.number].tolist() == c.values["told"].tolist()
        everywhere = torch.arange(batch.loss_weights.numel(), dtype=torch.float32).view_as(batch.loss_weights)
        found = gather_completion_values(batch, everywhere, micro)
        flat = [n for numbers in found.values() for n in numbers.tolist()]
        assert torch.equal(
            scatter_completion_values(batch, torch.tensor(flat)), torch.where(batch.loss_weights != 0, everywhere, 0.0)
        )


def test_a_row_of_silent_completions_has_the_fields_of_all() -> None:
    (batch,) = RolloutCollator(SHAPE, True, False).batches([[SILENT, SILENT]])
    assert not batch.loss_weights.any() and batch.fields["completions"].tolist() == [0, 1]
    assert not batch.fields["told"].any() and batch.fields["told"].shape == batch.input_ids.shape


def test_a_completion_of_tools_alone_counts() -> None:
    none = replace(completed(4, 2, "tt"), values={"told": np.zeros(0, np.float32)})
    (batch,) = RolloutCollator(SHAPE, False, False).batches([[none]])
    assert (
        none.count == 0
        and batch.label_tokens == 0
        and batch.fields["completions"].tolist() == [0]
        and not batch.fields["told"].any()
    )
