"""A trace's tensors laid out as another trace has the same documents, by hand.

Covers: megaswift/bisection/joined.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megaswift.bisection.joined import laid_out
from megaswift.bisection.reference import ReferenceStep
from megaswift.errors import UserError


def padded(*documents: list[int], length: int = 4) -> dict[str, Tensor]:
    """A document a row."""
    ids = torch.tensor([d + [0] * (length - len(d)) for d in documents])
    valid = torch.tensor([[i < len(d) for i in range(length)] for d in documents])
    return {"input_ids": ids, "labels": ids, "loss_weights": valid.float(), "valid": valid}


def packed(*documents: list[int]) -> dict[str, Tensor]:
    """All in one row."""
    bounds = torch.tensor([0, *(len(d) for d in documents)]).cumsum(0)
    joined = [token for d in documents for token in d]
    return {**padded(joined, length=len(joined)), "cu_seqlens": bounds.int()}


def step_of(rows: dict[tuple[int, int], dict[str, Tensor]]) -> ReferenceStep:
    """An output that is the token id, and a loss that is the micro-batch's number."""
    step = ReferenceStep()
    for number, fields in rows.items():
        step.activations["output", "layers.0", number] = fields["input_ids"].t().reshape(-1, 1).float()
        step.activations["loss", "loss", number] = torch.tensor([float(number[1])])
    return step


def test_documents_move_with_their_values() -> None:
    """Two replicas with a padded micro-batch each, and one with the same documents, packed otherwise."""
    rows = {(0, 0): padded([3, 4, 5], [6, 7]), (1, 0): padded([8, 9], [8, 9])}
    target = {(0, 0): packed([8, 9], [3, 4, 5]), (0, 1): packed([6, 7], [8, 9])}
    laid = laid_out(step_of(rows), rows, target)
    assert laid.activations["output", "layers.0", (0, 0)].flatten().tolist() == [8, 9, 3, 4, 5]
    assert laid.activations["output", "layers.0", (0, 1)].flatten().tolist() == [6, 7, 8, 9]
    assert not any(kind == "loss" for kind, _, _ in laid.activations), "sums over other documents"
    same = laid_out(step_of(rows), rows, {(0, 3): padded([6, 7], [3, 4, 5], length=6)})
    assert same.activations["loss", "loss", (0, 3)].tolist() == [0.0]
    whole = same.activations["output", "layers.0", (0, 3)].unflatten(0, (6, 2))
    assert whole[:, 0, 0].tolist() == [6, 7, 0, 0, 0, 0] and whole[:, 1, 0].tolist() == [3, 4, 5, 0, 0, 0]


def test_another_document() -> None:
    rows = {(0, 0): padded([3, 4, 5])}
    with pytest.raises(UserError, match="none is row 0 of micro-batch 1"):
        laid_out(step_of(rows), rows, {(0, 1): padded([3, 4])})
