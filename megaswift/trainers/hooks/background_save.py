"""A checkpoint that is written while training goes on (`--async_save`).

Owns the thread and its error. What is written is the engine's, when a checkpoint counts is `checkpoint_hook`'s.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaswift import distributed
from megaswift.engine.protocol import FileEntries, StartedSave
from megaswift.errors import ROOM, Problem, first_line


class BackgroundWriter:
    """Writes what engines have started to save. The thread ends with the process: files that it leaves behind belong to
    no checkpoint."""

    def __init__(self, saves: Mapping[str, StartedSave]) -> None:
        self.saves = saves
        self.written = False
        self.reason = ""
        self._thread = threading.Thread(target=self._write, name="checkpoint writer", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        try:
            for save in self.saves.values():
                save.write()
            self.written = True
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            self.reason = first_line(error)

    @property
    def busy(self) -> bool:
        """Whether it still writes."""
        return self._thread.is_alive()

    def finish(self, what: str) -> FileEntries:
        """Waits for all ranks' writers; the entries of this rank's files, by path within the step. Collective;
        CheckpointError on every rank where one could not write."""
        self._thread.join()
        problems = []
        if not self.written:
            why = self.reason or "see the error above"
            problems = [Problem(what, f"could not be written in the background ({why})", ROOM)]
        distributed.raise_on_all_ranks(problems)
        return {f"{part}/{name}": entry for part, save in self.saves.items() for name, entry in save.finish().items()}


@dataclass(frozen=True)
class PendingCheckpoint:
    """A checkpoint that is being written."""

    step: int
    folder: Path
    state: Mapping[str, Any]
    """The state of the trainer, as it was at this step."""
    best: int | None
    writer: BackgroundWriter
    began: float
    blocked: float
    """Seconds that training has waited for it so far."""
