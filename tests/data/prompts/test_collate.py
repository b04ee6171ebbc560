"""Completions to micro-batches: each number stands where its token is the label, packed and not, and comes back from
there."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

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
SESSION = replace(completed(4, 2, "xxtxxxtx"), further=[(2, [6, 7, 8]), (5, [9])])
MUTE = replace(completed(5, 2, "xtx", silent=True), further=[(1, [7])])
MICROS: list[RolloutMicrobatch] = [
    [PLAIN, TOOL],
    [SILENT, SHORT],
    [None, TOOL],
    [SILENT, None],
    [TOOL, SESSION],
    [None, SESSION],
    [SESSION, MUTE, SHORT],
]
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
            assert inside == tokens(c)


def tokens(c: RolloutTokens) -> list[int]:
    """Each segment with its own prompt before it."""
    edges = [0, *(place for place, _ in c.further), len(c.written)]
    prompts = [c.prompt, *(prompt for _, prompt in c.further)]
    return [t for prompt, (a, b) in zip(prompts, pairwise(edges), strict=True) for t in (*prompt, *c.written[a:b])]


@pytest.mark.parametrize("shares", [False, True])
def test_segments_are_documents_of_their_own(shares: bool) -> None:
    """Positions begin anew with each; neighbours with the same prompt share it, and a session counts once."""
    again = replace(SESSION, number=6, prompt=[9])
    batch, _ = RolloutCollator(SHAPE, True, False, shares_prefixes=shares).batches([[SESSION, again, PLAIN], [TOOL]])
    at = batch.loss_weights != 0
    assert batch.labels[at].tolist() == [t for c in (SESSION, again, PLAIN) for t in c.values["told"]]
    assert batch.cu_seqlens is not None and len(batch.cu_seqlens) - 1 == 7
    for start, end in pairwise(batch.cu_seqlens.tolist()):
        assert batch.positions[0, start:end].tolist() == [*range(end - start)]
    assert batch.fields["completions"].tolist() == [0, 3, 6]
    assert batch.fields["owner"].tolist() == [0, 0, 0, 3, 3, 3, 6]


def test_shared_prompts_of_sessions() -> None:
    """Neighbours share one, whether they are of one session or of two."""
    again = replace(SESSION, number=6, prompt=[6, 7, 8])
    before = replace(SESSION, further=[(2, [6, 7, 8])])
    (batch,) = RolloutCollator(SHAPE, True, False, shares_prefixes=True).batches([[before, again]])
    assert batch.prefixes is not None and batch.prefixes.tolist() == [-1, -1, 1, 1, 1, -1]
    assert batch.fields["completions"].tolist() == [0, 3] and batch.fields["owner"].tolist() == [0, 1, 0, 3, 3, 3]
    assert gather_completion_values(batch, batch.fields["told"], [before, again])[6].tolist() == [*again.values["told"]]


def test_a_pipeline_gets_as_many_rows_everywhere() -> None:
    shapes = {b.input_ids.shape for b in RolloutCollator(SHAPE, False, True).batches(MICROS)}
    assert shapes == {(6, 8)}


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
