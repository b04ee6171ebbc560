"""`--report_to`: TensorBoard events in OUT/runs, Weights & Biases, SwanLab and MLflow.

`preflight` refuses a requested tracker that is not installed; none is skipped silently.
"""

from __future__ import annotations

import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaswift import distributed
from megaswift.config.trackers import TrackerConfig
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


class TrackerHook(Hook, ABC):
    """A tracker on rank 0: scalars of metrics.jsonl as `train/...`, of eval.jsonl as `eval/...`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.session: Any = None
        """The tracker's writer or run; None on other ranks."""

    def on_start(self, loop: Loop) -> None:
        """Opens the run."""
        if distributed.global_rank() == 0:
            self.session = self.open(loop.step)

    def on_log(self, loop: Loop, line: Line) -> None:
        """Writes a line of metrics."""
        self._write("train", line)

    def on_evaluate(self, loop: Loop, line: Line) -> None:
        """Writes an evaluation."""
        self._write("eval", line)

    def _write(self, prefix: str, line: Line) -> None:
        if self.session is not None:
            self.send(scalars_of(prefix, line), line["step"])

    @abstractmethod
    def open(self, step: int) -> Any:
        """The tracker's own object, for a run that starts after `step`."""

    @abstractmethod
    def send(self, scalars: dict[str, float], step: int) -> None:
        """Writes the figures of a step."""

    def close(self) -> None:
        """Flushes and ends the run."""
        if self.session is not None:
            self.end()

    @abstractmethod
    def end(self) -> None:
        """What ends a run that was opened."""


class TensorBoard(TrackerHook):
    """Event files in `directory`; events past the checkpoint are hidden by `purge_step`."""

    def open(self, step: int) -> Any:
        """The event file."""
        from torch.utils.tensorboard import SummaryWriter

        threading.excepthook = _thread_error
        return SummaryWriter(str(self.directory), purge_step=step + 1)

    def send(self, scalars: dict[str, float], step: int) -> None:
        """One event a figure."""
        for name, value in scalars.items():
            self.session.add_scalar(name, value, step)

    def end(self) -> None:
        """Flushes the events."""
        self.session.close()


@dataclass(frozen=True)
class TrackedRun:
    """What online trackers show of a run, and where. What is not set comes from their own environment variables."""

    directory: Path
    """The output directory; files of a tracker are below it."""
    config: Mapping[str, Any]
    name: str | None = None
    """None: the output directory's name."""
    places: TrackerConfig = TrackerConfig()
    """Project, owner, mode and server of each tracker."""

    @property
    def title(self) -> str:
        """The run's name."""
        return self.name or self.directory.resolve().name

    def identity(self, tracker: str) -> str:
        """A random id in OUT/<tracker>/run-id, so that a resumed run goes on as the same one."""
        file = self.directory / tracker / "run-id"
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            file.write_text(secrets.token_hex(4), encoding="utf-8")
        return file.read_text(encoding="utf-8")


class WandB(TrackerHook):
    """Weights & Biases.

    The axis is a figure `step` of our own: its built-in one only grows, so that a run which went on from an earlier
    checkpoint would lose the steps that it repeats.
    """

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run.directory)
        self.run = run

    def open(self, step: int) -> Any:
        """A new run, or the one of an earlier start."""
        import wandb

        session = wandb.init(
            project=self.run.places.wandb_project,
            entity=self.run.places.wandb_entity,
            dir=str(self.directory),
            name=self.run.title,
            config=dict(self.run.config),
            id=self.run.identity("wandb"),
            resume="allow",
        )
        session.define_metric("step", hidden=True)
        for prefix in ("train", "eval"):
            session.define_metric(f"{prefix}/*", step_metric="step")
        return session

    def send(self, scalars: dict[str, float], step: int) -> None:
        """One record."""
        self.session.log({**scalars, "step": step})

    def end(self) -> None:
        """Ends the run."""
        self.session.finish()


class SwanLab(TrackerHook):
    """SwanLab; files of its offline mode go to OUT/swanlab."""

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run.directory)
        self.run = run

    def open(self, step: int) -> Any:
        """A new run, or the one of an earlier start."""
        import swanlab

        places = self.run.places
        token = places.swanlab_token
        return swanlab.init(
            project=places.swanlab_project,
            workspace=places.swanlab_workspace,
            mode=places.swanlab_mode,
            settings=None if token is None else swanlab.Settings(api_key=token),
            name=self.run.title,
            config=dict(self.run.config),
            log_dir=str(self.directory / "swanlab"),
            id=self.run.identity("swanlab"),
            resume="allow",
        )

    def send(self, scalars: dict[str, float], step: int) -> None:
        """One record."""
        self.session.log(scalars, step=step)

    def end(self) -> None:
        """Ends the run."""
        self.session.finish()


PARAMETERS = 100
"""MLflow's limit on parameters in one request."""


class MLflow(TrackerHook):
    """MLflow. Its server makes the id of a run, which OUT/mlflow/run-id keeps for a resumed one.

    Parameters cannot be changed once they are there: those of the first start stay.
    """

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run.directory)
        self.run = run

    def open(self, step: int) -> Any:
        """A new run, or the one of an earlier start."""
        import mlflow

        if self.run.places.mlflow_tracking_uri is not None:
            mlflow.set_tracking_uri(self.run.places.mlflow_tracking_uri)
        if self.run.places.mlflow_experiment_name is not None:
            mlflow.set_experiment(self.run.places.mlflow_experiment_name)
        file = self.directory / "mlflow" / "run-id"
        nested = mlflow.active_run() is not None
        if file.exists():
            return mlflow.start_run(run_id=file.read_text(encoding="utf-8"), nested=nested)
        session = mlflow.start_run(run_name=self.run.title, nested=nested)
        file.parent.mkdir(exist_ok=True)
        file.write_text(session.info.run_id, encoding="utf-8")
        parameters = [
            (f"{section}.{name}" if isinstance(values, Mapping) else section, value)
            for section, values in self.run.config.items()
            for name, value in (values.items() if isinstance(values, Mapping) else [("", values)])
        ]
        for start in range(0, len(parameters), PARAMETERS):
            mlflow.log_params(dict(parameters[start : start + PARAMETERS]))
        return session

    def send(self, scalars: dict[str, float], step: int) -> None:
        """One request."""
        import mlflow

        mlflow.log_metrics(scalars, step=step, run_id=self.session.info.run_id)

    def end(self) -> None:
        """Ends the run."""
        import mlflow

        mlflow.end_run()


ONLINE: dict[str, Callable[[TrackedRun], Hook]] = {"wandb": WandB, "swanlab": SwanLab, "mlflow": MLflow}


def tracker_hooks(report_to: Sequence[str], run: TrackedRun) -> list[Hook]:
    """The hooks for `report_to`, checked before."""
    events = Path(run.places.tensorboard_dir or run.directory / "runs")
    local: list[Hook] = [TensorBoard(events)] if "tensorboard" in report_to else []
    return local + [make(run) for name, make in ONLINE.items() if name in report_to]
