"""A rank that loads a model and tells what it has read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from megaswift.errors import Problem, WeightsError
from tests.engine.checkpoint_worker import Run, build
from tests.parity.cases import Case


def load(rank: int, world: int, job: tuple[Case, Path]) -> tuple[int, dict[str, Tensor]]:
    """Bytes of tensors that this rank has read, and on rank 0 the engine's weights."""
    from megaswift.bridge.file_tensor import OpenFileReader

    read, fill = [0], OpenFileReader.fill

    def counted(self: Any, *values: Any) -> None:
        before = self.bytes_read
        fill(self, *values)
        read[0] += self.bytes_read - before

    OpenFileReader.fill = counted  # type: ignore[method-assign]
    engine, _ = build(Run(*job), world)
    taken = read[0]
    return taken, dict(engine.hf_weights())


def fail(rank: int, world: int, job: tuple[Case, Path]) -> str:
    """The error of a rank where rank 1 cannot read its share."""
    from megaswift.bridge.plan import PlanEntry

    if rank == 1:

        def unreadable(self: Any, *_: Any) -> Tensor:
            raise WeightsError(Problem(self.hf[0], "cannot be read"))

        PlanEntry.read = unreadable  # type: ignore[method-assign]
    try:
        build(Run(*job), world)
    except WeightsError as error:
        return str(error)
    return ""
