"""The head of a teacher whose hidden states come with the batches of a student (distillation)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TeacherHead:
    """Rows of the weight of a teacher's output layer, in memory of the student's device."""

    weight: Tensor
    """[rows, hidden size of the teacher], the rows of this rank's part of the student's vocabulary. Rows behind the
    vocabulary's end are of any value."""
    columns: int
    """Leading rows that are tokens of both models. Divergences go over these tokens, of all ranks."""
    scale: float = 1.0
    """Factor of the logits."""
    softcap: float | None = None
    """Bound of the logits, by tanh, after the factor."""
