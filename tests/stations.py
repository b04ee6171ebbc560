"""Records which files of the package a run enters: at start-up, and in each of its steps, in the order of first entry.

`python tests/stations.py OUT.json WORDS...` trains by `megaswift sft WORDS...` in this process and writes
`{"start": [...], "steps": [[...], ...]}`. A file is entered when one of its functions starts on the main thread; code
that runs while a module is imported does not count. A step goes from one `on_step_begin` to the next; the last one
holds the end of the run too.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from types import FrameType

PACKAGE = f"{Path(__file__).resolve().parent.parent / 'megaswift'}/"
LOOP = "trainers/loop.py"
"""Its `train` emits `on_step_begin`, so a step is in this file before any function of the step starts."""


def is_importing(frame: FrameType | None) -> bool:
    """Whether a module of the package is being imported."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


class Recorder:
    """A profile function that notes entries by phase: first the start-up, then each step."""

    def __init__(self) -> None:
        self.phases: list[list[str]] = [[]]

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Notes a function of the package that starts."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE) or not code.co_flags & inspect.CO_OPTIMIZED:
            return
        if code.co_name == "emit" and frame.f_locals.get("event") == "on_step_begin":
            self.phases.append([LOOP])
        name = code.co_filename.removeprefix(PACKAGE)
        if name not in self.phases[-1] and not is_importing(frame):
            self.phases[-1].append(name)


def main(out: str, *words: str) -> int:
    """Trains, and writes which files were entered."""
    recorder = Recorder()
    sys.setprofile(recorder)
    from megaswift.commands.training import main as train

    code = train("sft", words)
    sys.setprofile(None)
    start, *steps = recorder.phases
    Path(out).write_text(json.dumps({"start": start, "steps": steps}), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
