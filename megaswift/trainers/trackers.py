"""`--report_to`: TensorBoard events in OUT/runs, and Weights & Biases.

`preflight` refuses a requested tracker that is not installed; none is skipped silently.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaswift import distributed
from megaswift.trainers.hook import Hook, Line

if TYPE_CHECKING:
    from megaswift.trainers.loop import Loop

WRITER_THREAD = "_AsyncWriterThread"
"""tensorboard 2.x, summary/writer/event_file_writer.py."""


def scalars_of(prefix: str, line: Line) -> dict[str, float]:
    """The figures of a line under `prefix/name`; the step itself is the axis."""
    return {
        f"{prefix}/{k}": v
        for k, v in line.items()
        if k != "step" and isinstance(v, (int, float)) and not isinstance(v, bool)
    }


def _thread_error(args: threading.ExceptHookArgs) -> None:
    """TensorBoard's writer thread raises what it also hands to the next write, where it ends the run with a message:
    the thread's own traceback is not printed."""
    if not (type(args.thread).__name__ == WRITER_THREAD and isinstance(args.exc_value, OSError)):
        threading.__excepthook__(args)


class TensorBoard(Hook):
    """Scalars of metrics.jsonl as `train/...`, of eval.jsonl as `eval/...`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.writer: Any = None

    def on_start(self, loop: Loop) -> None:
        """Opens the event file; events past the checkpoint are hidden by `purge_step`."""
        if distributed.global_rank() == 0:
            from torch.utils.tensorboard import SummaryWriter

            threading.excepthook = _thread_error
            self.writer = SummaryWriter(str(self.directory), purge_step=loop.step + 1)

    def on_log(self, loop: Loop, line: Line) -> None:
        """Writes a line of metrics."""
        self._write("train", line)

    def on_evaluate(self, loop: Loop, line: Line) -> None:
        """Writes an evaluation."""
        self._write("eval", line)

    def _write(self, prefix: str, line: Line) -> None:
        if self.writer is not None:
            for name, value in scalars_of(prefix, line).items():
                self.writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        """Flushes the events."""
        if self.writer is not None:
            self.writer.close()


class WandB(Hook):
    """The same for Weights & Biases; project, entity and mode come from its own environment variables (WANDB_PROJECT,
    ...).

    The axis is a figure `step` of our own: its built-in one only grows, so that a run which went on from an earlier
    checkpoint would lose the steps that it repeats.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        self.directory, self.config = directory, dict(config)
        self.session: Any = None

    def on_start(self, loop: Loop) -> None:
        """Opens the run, under the output directory's name; a resumed run goes on as the same one
        (OUT/wandb/run-id)."""
        if distributed.global_rank() == 0:
            import wandb

            identity = self.directory / "wandb" / "run-id"
            if not identity.exists():
                identity.parent.mkdir(exist_ok=True)
                identity.write_text(secrets.token_hex(4), encoding="utf-8")
            self.session = wandb.init(
                dir=str(self.directory),
                name=self.directory.resolve().name,
                config=self.config,
                id=identity.read_text(encoding="utf-8"),
                resume="allow",
            )
            self.session.define_metric("step", hidden=True)
            for prefix in ("train", "eval"):
                self.session.define_metric(f"{prefix}/*", step_metric="step")

    def on_log(self, loop: Loop, line: Line) -> None:
        """Sends a line of metrics."""
        self._send("train", line)

    def on_evaluate(self, loop: Loop, line: Line) -> None:
        """Sends an evaluation."""
        self._send("eval", line)

    def _send(self, prefix: str, line: Line) -> None:
        if self.session is not None:
            self.session.log({**scalars_of(prefix, line), "step": line["step"]})

    def close(self) -> None:
        """Ends the run."""
        if self.session is not None:
            self.session.finish()


def tracker_hooks(report_to: Sequence[str], directory: Path, config: Mapping[str, Any]) -> list[Hook]:
    """The hooks for `report_to`, checked before."""
    hooks: list[Hook] = []
    if "tensorboard" in report_to:
        hooks.append(TensorBoard(directory / "runs"))
    if "wandb" in report_to:
        hooks.append(WandB(directory, config))
    return hooks
