"""`report_to`: TensorBoard events under OUT/runs, and Weights & Biases when it is installed and asked for.

A tracker that is asked for and not installed is an error before the run, never a silent omission.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaswift.errors import Problem, nearest
from megaswift.trainers import agree
from megaswift.trainers.hook import Hook, Line

if TYPE_CHECKING:
    from megaswift.trainers.loop import Loop

TRACKERS = {"tensorboard": "tensorboard", "wandb": "wandb"}
"""Name in `report_to` -> the package it needs."""


def numbers(prefix: str, line: Line) -> dict[str, float]:
    """The figures of a line under `prefix/name`; the step itself is the axis."""
    return {f"{prefix}/{k}": v for k, v in line.items() if k != "step" and isinstance(v, (int, float)) and not isinstance(v, bool)}


def check(report_to: Sequence[str]) -> list[Problem]:
    """What is wrong with `report_to`."""
    problems = []
    for name in report_to:
        if name == "none":
            continue
        if name not in TRACKERS:
            known = ", ".join([*TRACKERS, "none"])
            problems.append(Problem(f"--report_to {name}", f"is not known; known are {known}", nearest(name, list(TRACKERS))))
        elif importlib.util.find_spec(TRACKERS[name]) is None:
            problems.append(Problem(f"--report_to {name}", f"the package {TRACKERS[name]} is not installed",
                                    f"pip install {TRACKERS[name]}, or leave it out of --report_to"))
    return problems


class TensorBoard(Hook):
    """Scalars of metrics.jsonl as `train/...`, of eval.jsonl as `eval/...`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.writer: Any = None

    def on_start(self, loop: Loop) -> None:
        """Opens the event file; events past the checkpoint are hidden by `purge_step`."""
        if agree.rank() == 0:
            from torch.utils.tensorboard import SummaryWriter
            self.writer = SummaryWriter(str(self.directory), purge_step=loop.step + 1)

    def on_log(self, loop: Loop, line: Line) -> None:
        """Writes a line of metrics."""
        self._write("train", line)

    def on_evaluate(self, loop: Loop, line: Line) -> None:
        """Writes an evaluation."""
        self._write("eval", line)

    def _write(self, prefix: str, line: Line) -> None:
        if self.writer is not None:
            for name, value in numbers(prefix, line).items():
                self.writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        """Flushes the events."""
        if self.writer is not None:
            self.writer.close()


class WandB(Hook):
    """The same for Weights & Biases; project, entity and mode come from its own environment variables (WANDB_PROJECT, ...)."""

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        self.directory, self.config = directory, dict(config)
        self.session: Any = None

    def on_start(self, loop: Loop) -> None:
        """Opens the run, under the output directory's name: a resumed run goes on as the same one."""
        if agree.rank() == 0:
            import wandb
            name = self.directory.resolve().name
            self.session = wandb.init(dir=str(self.directory), name=name, config=self.config, resume="allow")

    def on_log(self, loop: Loop, line: Line) -> None:
        """Sends a line of metrics."""
        if self.session is not None:
            self.session.log(numbers("train", line), step=line["step"])

    def on_evaluate(self, loop: Loop, line: Line) -> None:
        """Sends an evaluation."""
        if self.session is not None:
            self.session.log(numbers("eval", line), step=line["step"])

    def close(self) -> None:
        """Ends the run."""
        if self.session is not None:
            self.session.finish()


def trackers(report_to: Sequence[str], directory: Path, config: Mapping[str, Any]) -> list[Hook]:
    """The hooks for `report_to`, checked before."""
    hooks: list[Hook] = []
    if "tensorboard" in report_to:
        hooks.append(TensorBoard(directory / "runs"))
    if "wandb" in report_to:
        hooks.append(WandB(directory, config))
    return hooks
