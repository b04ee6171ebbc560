"""Prompts laid once for their completions: which tokens are where, with which positions and labels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megaswift.data.batches.collate import Document, PaddingShape
from megaswift.data.preference.collate import PreferenceCollator, PreferenceUnit
from megaswift.data.prompts.collate import RolloutCollator, RolloutTokens, gather_completion_values
from megaswift.losses.contract import Batch
from megaswift.losses.document_segments import document_index
from megaswift.losses.reward import weight_last_tokens_only
from megaswift.trainers.loop import length_squares

SHAPE = PaddingShape()


def completed(number: int, prompt: list[int], written: list[int], own: str = "") -> RolloutTokens:
    """`own`: an x for each token of the policy's; empty: all. `told` is the token itself."""
    mine = [c == "x" for c in own or "x" * len(written)]
    values = np.asarray([t for t, m in zip(written, mine, strict=True) if m], dtype=np.float32)
    return RolloutTokens(number, prompt, written, mine, {"told": values})


def laid(*completions: RolloutTokens | None, shape: PaddingShape = SHAPE, shares: bool = True) -> Batch:
    return RolloutCollator(shape, True, False, shares_prefixes=shares).batches([completions])[0]


def test_a_prompt_lies_once_and_its_last_token_with_each_completion() -> None:
    """Two completions of [5, 6, 7]; of [8, 9] one."""
    batch = laid(completed(0, [5, 6, 7], [10, 11]), completed(1, [5, 6, 7], [12]), completed(2, [8, 9], [13]))
    assert batch.input_ids.tolist() == [[5, 6, 7, 10, 11, 7, 12, 8, 9, 13]]
    assert batch.cu_seqlens is not None and batch.cu_seqlens.tolist() == [0, 2, 5, 7, 10]
    assert batch.prefixes is not None and batch.prefixes.tolist() == [-1, 0, 0, -1]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 2, 3, 0, 1, 2]]
    assert (batch.loss_weights != 0).nonzero()[:, 1].tolist() == [2, 3, 5, 8]
    assert batch.labels[batch.loss_weights != 0].tolist() == [10, 11, 12, 13]
    assert batch.sample_ids is not None and batch.sample_ids.tolist() == [-1, 0, 1, 2]
    assert batch.fields["completions"].tolist() == [1, 2, 3]
    torch.testing.assert_close(batch.fields["told"], torch.where(batch.loss_weights != 0, batch.labels.float(), 0.0))


@pytest.mark.parametrize(
    "completions",
    [
        (completed(0, [5], [6]), completed(1, [5], [7])),
        (completed(0, [5, 6], [6]), completed(1, [5, 7], [7])),
        (completed(0, [5, 6], [7, 8]), completed(1, [5, 6, 7], [8])),
        (completed(0, [5, 6], [7]), completed(1, [8, 9], [7]), completed(2, [5, 6], [8])),
        (completed(0, [5, 6], [7]),),
        (None, None),
    ],
    ids=("one token", "others", "longer", "apart", "alone", "fillers"),
)
def test_nothing_to_share_changes_nothing(completions: tuple[RolloutTokens | None, ...]) -> None:
    """Prompts of one token, different prompts, equal ones that are not neighbours."""
    shared, plain = laid(*completions), laid(*completions, shares=False)
    assert shared.prefixes is None
    for name in ("input_ids", "labels", "loss_weights", "positions", "valid", "cu_seqlens", "sample_ids"):
        assert torch.equal(getattr(shared, name), getattr(plain, name)), name
    assert torch.equal(shared.fields["completions"], plain.fields["completions"])


def test_numbers_come_back_from_where_they_are() -> None:
    """Padding after each document, a row without weight between, tokens of a tool."""
    micro = [
        completed(4, [5, 6, 7], [10, 11, 12], "xtx"),
        None,
        completed(2, [5, 6, 7], [13, 14]),
        replace(completed(9, [5, 6, 7], [15]), silent=True, values={"told": np.zeros(0, dtype=np.float32)}),
    ]
    batch = laid(*micro, shape=PaddingShape(4, 8))
    assert batch.cu_seqlens is not None and batch.cu_seqlens.tolist() == [0, 4, 8, 12, 16]
    assert batch.prefixes is not None and batch.prefixes.tolist() == [-1, 0, 0, 0]
    assert batch.positions[0, 4:].tolist() == [2, 3, 4, 5, 2, 3, 4, 5, 2, 3, 4, 5]
    back = gather_completion_values(batch, batch.fields["told"], micro)
    assert {n: v.tolist() for n, v in back.items()} == {4: [10.0, 12.0], 2: [13.0, 14.0]}
    documents = document_index(batch)[0, [2, 3, 4, 6, 8]]
    assert documents.tolist() == [0, 0, 1, 1, 2], "padding belongs to its document"


def test_pairs_of_query_and_key_are_counted_once() -> None:
    """The FLOP rule's sum: 3 squared of the whole prompt and completion, less what the others have of it."""
    micro = [completed(i, [5, 6, 7], [10 + i, 20 + i]) for i in range(3)]
    shared, plain = laid(*micro), laid(*micro, shares=False)
    assert length_squares(plain) == 3 * 5**2 and length_squares(shared) == 5**2 + 2 * (5**2 - 2**2)


def answer(ids: list[int], labeled: int, sample: int = 0) -> Document:
    """A document whose last `labeled` tokens carry loss."""
    weights = [0] * (len(ids) - labeled) + [1] * labeled
    return np.asarray(ids, dtype=np.int32), np.asarray(weights, dtype=np.uint8), sample


def laid_pairs(*units: list[Document], shares: bool = True) -> Batch:
    collator = PreferenceCollator(2, True, True, shares_prefixes=shares)
    return collator.batches([[PreferenceUnit(unit, 0.5) for unit in units]], SHAPE, False)[0]


def test_a_pair_has_its_prompt_once() -> None:
    """The second pair's answers begin alike, too, but with tokens that carry loss."""
    first = [answer([5, 6, 7, 8, 9], 2, 3), answer([5, 6, 7, 10], 1, 3)]
    second = [answer([5, 11, 12, 13], 2, 4), answer([5, 11, 12, 14, 15], 3, 4)]
    batch = laid_pairs(first, second)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 7, 10, 5, 11, 12, 13, 11, 12, 14, 15]]
    assert batch.prefixes is not None and batch.prefixes.tolist() == [-1, 0, 0, -1, 3, 3]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 2, 3, 0, 1, 2, 3, 1, 2, 3, 4]]
    assert batch.labels[batch.loss_weights != 0].tolist() == [8, 9, 10, 12, 13, 12, 14, 15]
    assert batch.fields["pairs"].tolist() == [[1, 2], [4, 5]] and batch.fields["margin"].tolist() == [0.5, 0.5]
    last = weight_last_tokens_only(batch).loss_weights.nonzero()[:, 1].tolist()
    assert last == [4, 6, 10, 14], "of answers, not of prompts"


@pytest.mark.parametrize(
    "unit",
    [
        [answer([5, 6, 7, 8], 1), answer([9, 6, 7, 10], 1)],
        [answer([5, 6, 7], 2), answer([5, 8], 1)],
        [answer([5, 6], 2), answer([5, 6], 2)],
    ],
    ids=("cut differently", "one common token", "no prompt"),
)
def test_pairs_with_nothing_in_common_stay_apart(unit: list[Document]) -> None:
    shared, plain = laid_pairs(unit), laid_pairs(unit, shares=False)
    assert shared.prefixes is None and torch.equal(shared.input_ids, plain.input_ids)
    assert shared.fields["pairs"].tolist() == plain.fields["pairs"].tolist() == [[0, 1]]


def test_only_what_both_answers_begin_with_is_shared() -> None:
    """Answers that were cut after another prompt token: [5, 6] is common, the 7 is not."""
    batch = laid_pairs([answer([5, 6, 7, 8], 1), answer([5, 6, 9, 10], 1)])
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 6, 9, 10]]
    assert batch.prefixes is not None and batch.prefixes.tolist() == [-1, 0, 0]
