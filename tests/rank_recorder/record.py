"""What a rank did, phase by phase: collectives by kind and group size, their bytes, files and their bytes."""

from __future__ import annotations

import io
import pickle
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from megaswift.simulator.calls import Group, bytes_of

START, STEP, ROLLOUT, EXPORT = "start-up", "step", "rollout", "export"
SAVE, LINE, EVALUATION = "CheckpointHook", "MetricsJsonlHook", "EvaluationHook"
"""Phases."""


class _ArrayCounter(pickle.Pickler):
    """Adds up the bytes of tensors and arrays in what it pickles."""

    found = 0

    def persistent_id(self, value: Any) -> None:
        """Called for every object; changes none."""
        if isinstance(value, Tensor | np.ndarray):
            self.found += value.nbytes


class Kind(NamedTuple):
    """Collectives that are counted together."""

    phase: str
    name: str
    """As torch.distributed names it."""
    ranks: int
    """Size of the group."""


@dataclass
class RankRecord:
    """The counts of one rank."""

    calls: Counter[Kind] = field(default_factory=Counter)
    sent: Counter[Kind] = field(default_factory=Counter)
    """Bytes of this rank's own tensors."""
    largest_received: dict[Kind, int] = field(default_factory=dict)
    """Bytes of the largest result that one call leaves on this rank."""
    files_read: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(phase, path) -> times that it was opened. RANK is the rank's own number, HASH any."""
    files_written: Counter[tuple[str, str]] = field(default_factory=Counter)
    tensor_bytes_read: Counter[str] = field(default_factory=Counter)
    """Phase -> bytes of tensors that were read from files."""
    array_bytes_in_objects: Counter[str] = field(default_factory=Counter)
    """Phase -> bytes of tensors and arrays within the Python objects that this rank sent."""
    object_sizes: dict[str, list[int]] = field(default_factory=dict)
    """Phase -> bytes of each object that this rank sent, before they are padded to those of others."""
    phase: str = START

    def add(self, name: str, group: Group, sent: Any = (), received: Any = (), *_: Any, **__: Any) -> None:
        """Counts one call."""
        kind = Kind(self.phase, name, len(group.ranks))
        self.calls[kind] += 1
        self.sent[kind] += bytes_of(sent)
        self.largest_received[kind] = max(self.largest_received.get(kind, 0), bytes_of(received))

    def opened(self, path: Path, rank: int, writes: bool) -> None:
        """Counts a file."""
        own = rf"(?<=/__){rank}(?=_\d+\.distcp$)|(?<=/rng-){rank:05d}(?=\.safetensors$)|(?<=/rank-){rank}(?=\.txt$)"
        name = re.sub(own, "RANK", path.as_posix())
        name = re.sub(r"(?<=\.build-)\d+", "PROCESS", re.sub(r"\b[0-9a-f]{32}\b", "HASH", name))
        (self.files_written if writes else self.files_read)[self.phase, name] += 1

    def pickled(self, value: Any) -> None:
        """Counts arrays within an object that is sent."""
        counter = _ArrayCounter(content := io.BytesIO())
        counter.dump(value)
        self.object_sizes.setdefault(self.phase, []).append(content.tell())
        self.array_bytes_in_objects[self.phase] += counter.found

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """A phase for the length of a block."""
        outer, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = outer

    def differences(self, other: RankRecord) -> dict[Any, tuple[Any, Any]]:
        """What is counted -> both values, where they differ."""
        counted = (f.name for f in fields(self) if f.name not in ("object_sizes", "phase"))
        pairs = ((vars(self)[name], vars(other)[name]) for name in counted)
        return {
            key: (a.get(key, 0), b.get(key, 0)) for a, b in pairs for key in a | b if a.get(key, 0) != b.get(key, 0)
        }

    def of(self, phase: str, least_ranks: int = 2) -> dict[tuple[str, int], tuple[int, int]]:
        """(kind, group size) -> (calls, bytes) of a phase, groups of at least so many ranks."""
        return {
            (kind.name, kind.ranks): (calls, self.sent[kind])
            for kind, calls in self.calls.items()
            if kind.phase == phase and kind.ranks >= least_ranks
        }
