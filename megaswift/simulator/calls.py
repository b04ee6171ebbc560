"""Records what a rank does in a step: calls to other ranks in their order, passes of the pipeline, live memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor

START = "start-up"
PACKAGE = Path(__file__).parents[1]
OURS = f"{PACKAGE}/"
TORCHS = "/torch/"
SKIPPED = (f"{PACKAGE}/simulator/", f"{PACKAGE}/engine/megatron/cpu/", TORCHS, "/typing_extensions.py")
"""Folders whose code stands between a call and the line that wants it."""

Form = tuple[tuple[tuple[int, ...], str], ...]
"""(shape, dtype) of each tensor."""


def bytes_of(tensors: Any) -> int:
    """Return the bytes of a tensor, or of all in nested lists."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(bytes_of, tensors or ()))


def form_of(tensors: Any) -> Form:
    """Return the shapes and dtypes of a tensor, or of all in nested lists."""
    if isinstance(tensors, Tensor):
        return ((tuple(tensors.shape), str(tensors.dtype).removeprefix("torch.")),)
    return tuple(form for tensor in tensors or () for form in form_of(tensor))


class Group(NamedTuple):
    """A process group, by the name that all of its ranks have for it."""

    name: str
    ranks: tuple[int, ...]
    """Global ranks."""


class Call(NamedTuple):
    """One collective, message or wait of a rank."""

    name: str
    """As torch.distributed names it."""
    group: Group
    sent: Form
    received: Form
    sent_bytes: int
    received_bytes: int
    peer: int | None
    """Global rank to or from which a message goes, or of the root."""
    detail: tuple[Any, ...]
    """The reduction, or rows to and from each rank of an all-to-all."""
    where: str
    """file:line of the code that wants it."""
    phase: str
    step: int
    """From 1; 0 before the first one."""


def caller() -> str:
    """Return file:line of the innermost code that calls torch's collectives and, where that is not ours, of the
    innermost that is."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and TORCHS not in frame.f_code.co_filename:  # the recording group
        frame = frame.f_back
    found: list[str] = []
    while frame is not None and len(found) < 2:
        name = frame.f_code.co_filename
        if not (found and not name.startswith(OURS)) and not any(part in name for part in SKIPPED):
            found.append(f"{_short(name)}:{frame.f_lineno}")
            if name.startswith(OURS):
                break
        frame = frame.f_back
    return " < ".join(found)


@cache
def _short(name: str) -> str:
    for root in ("/site-packages/", OURS.removesuffix(PACKAGE.name + "/")):  # an environment may lie in the checkout
        if root in name:
            return name.split(root, 1)[1]
    return name


class Pass(NamedTuple):
    """A forward or backward pass of a micro-batch through a model chunk."""

    kind: str
    """`forward` or `backward`."""
    chunk: int
    microbatch: int
    first: int
    """Number of the first call in it."""
    last: int
    """One past the number of the last call in it."""
    step: int


@dataclass
class Trace:
    """The record of one rank."""

    rank: int
    calls: list[Call] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    memory: list[tuple[str, int, int]] = field(default_factory=list)
    """(moment, live bytes, most live bytes since the moment before), in order."""
    phase: str = START
    step: int = 0

    def add(
        self,
        name: str,
        group: Group,
        sent: Any = (),
        received: Any = (),
        peer: int | None = None,
        detail: Sequence[Any] = (),
    ) -> None:
        """Record one call with this rank's tensors and those that it receives; none of a group of one rank."""
        if len(group.ranks) == 1:
            return
        self.calls.append(
            Call(
                name,
                group,
                form_of(sent),
                form_of(received),
                bytes_of(sent),
                bytes_of(received),
                peer,
                tuple(detail),
                caller(),
                self.phase,
                self.step,
            )
        )

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Name a phase for the length of a block."""
        outer = self.phase
        self.phase = phase
        try:
            yield
        finally:
            self.phase = outer
