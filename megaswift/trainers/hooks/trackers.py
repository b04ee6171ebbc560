"""`--report_to`: TensorBoard events in OUT/runs, Weights & Biases, SwanLab, MLflow, Trackio and Prometheus.

`preflight` refuses a requested tracker that is not installed; none is skipped silently. Once a run has begun, no
tracker ends or delays it.
"""

from __future__ import annotations

import collections
import re
import secrets
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaswift import distributed, log
from megaswift.error_exit import calls_left_behind
from megaswift.errors import first_line
from megaswift.trainers.hook import Hook, Line, Run
from megaswift.trainers.hooks.progress import print_line, print_warning
from megaswift.trainers.options.tracker import TrackerConfig

WRITER_THREAD = "_AsyncWriterThread"
"""tensorboard 2.x, summary/writer/event_file_writer.py."""


def scalars_of(prefix: str, line: Line) -> dict[str, float]:
    """Return the figures of a line under `prefix/name`, without the step, which is the axis."""
    return {
        f"{prefix}/{k}": v
        for k, v in line.items()
        if k != "step" and isinstance(v, (int, float)) and not isinstance(v, bool)
    }


def _thread_error(args: threading.ExceptHookArgs) -> None:
    """TensorBoard's writer thread raises what it also hands to the next write, which becomes a warning: the thread's
    own traceback is not printed."""
    if not (type(args.thread).__name__ == WRITER_THREAD and isinstance(args.exc_value, OSError)):
        threading.__excepthook__(args)


MOST_WAITING = 10_000
"""Records that wait for a tracker; of more the oldest are given up."""
FIRST_RETRY_S = 1.0
"""Seconds between the first two attempts; each further wait is twice as long."""
LONGEST_RETRY_S = 60.0
"""Maximum seconds between two attempts."""
SLOW_S = 60.0
"""A call that takes so long is worth a line."""
END_S = 30.0
"""How long the end of a run waits for all its trackers together."""
END_AFTER_ERROR_S = 2.0
"""The same on a rank that failed: others wait for it."""
TRIES = 3
"""After so many failed attempts at a record the next one is tried too: a tracker may refuse the one record."""
BEGIN = "begin"
"""Precedes the first record."""
END = "end"
"""Follows the last record."""

Record = tuple[dict[str, float], int]
"""Figures, and the step that they are of."""


class TrackerGroup:
    """The trackers of a run, which end together: their time is counted once."""

    def __init__(self) -> None:
        self.members: list[TrackerHook] = []
        self._deadline: float | None = None

    def seconds_left(self) -> float:
        """Returns what is left of the time for the end of the run, which begins with the first call; asks all trackers
        to end."""
        if self._deadline is None:
            self._deadline = time.monotonic() + END_S
            for hook in self.members:
                hook.finish()
        return max(0.0, self._deadline - time.monotonic())


class TrackerHook(Hook, ABC):
    """A tracker on rank 0: scalars of metrics.jsonl as `train/...`, of eval.jsonl as `eval/...`.

    The training loop only puts records into a queue. One thread makes all calls of the tracker's library, and whatever
    these raise, and however long they take, the run goes on: the thread warns once for each outage and tries again. At
    the end of the run it gets `END_S` seconds to send the rest; what it cannot send is in the lines on disk.
    """

    reopens = False
    """A call that failed leaves a session that is of no use any more."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.session: Any = None
        """The tracker's writer or run, of its thread; None until it is open."""
        self.group = TrackerGroup()
        self.group.members.append(self)
        self._changed = threading.Condition()
        self._records: collections.deque[Record | str] = collections.deque([BEGIN])
        self._taken: list[Record | str] = []
        """Taken from the queue and not sent."""
        self._thread: threading.Thread | None = None
        self._step = 0
        """After this step what is sent begins."""
        self._lost = 0
        self._failures = 0
        """In a row."""
        self._told = self._closing = self._ended = False
        self._calling = 0.0
        """When the call began that is under way; 0: none is."""

    @property
    def title(self) -> str:
        """The tracker's name for messages."""
        return type(self).__name__

    def join(self, group: TrackerGroup) -> TrackerHook:
        """Ends together with the others of `group`."""
        group.members.append(self)
        self.group = group
        return self

    def on_start(self, run: Run) -> None:
        """Starts the thread, which opens the run."""
        if distributed.global_rank() == 0:
            self._step = run.step
            self.prepare()
            self._thread = threading.Thread(target=self._work, name=f"{self.title} tracker", daemon=True)
            self._thread.start()

    def prepare(self) -> None:
        """Notes what only the calling thread can find out; makes no call that may fail or wait."""

    def on_log(self, run: Run, line: Line) -> None:
        """Takes a line of metrics."""
        self._put(scalars_of("train", line), line["step"])

    def on_evaluate(self, run: Run, line: Line) -> None:
        """Takes an evaluation."""
        self._put(scalars_of("eval", line), line["step"])

    def _put(self, scalars: dict[str, float], step: int) -> None:
        if self._thread is None:
            return
        with self._changed:
            if len(self._records) >= MOST_WAITING:
                self._records.popleft()
                self._lost += 1
            self._records.append((scalars, step))
            self._changed.notify()
        if self._calling and not self._told and time.monotonic() - self._calling > SLOW_S:
            self._warn(f"has not answered for {SLOW_S:.0f} s")

    def finish(self) -> None:
        """Asks the thread to end behind the last record; does not wait."""
        with self._changed:
            if self._thread is not None and not self._closing:
                self._closing = True
                self._records.append(END)
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread. On several ranks `wait` comes later, so that no other rank waits in a collective for it."""
        self.group.seconds_left()
        if distributed.global_world_size() == 1:
            self.wait()

    def wait(self, seconds: float = float("inf")) -> None:
        """Waits until the tracker has everything, at most `seconds`, and `END_S` for all trackers of the run together;
        says what it does not have."""
        if self._thread is None:
            return
        thread = self._thread
        self._thread = None
        thread.join(min(seconds, self.group.seconds_left()))
        with self._changed:
            missing = self._lost + sum(not isinstance(record, str) for record in (*self._taken, *self._records))
        if thread.is_alive():
            calls_left_behind.append(self.title)
        if missing or not self._ended:
            what = log.count_text(missing, "record") if missing else "the end of the run"
            print_warning(
                f"{self.title}: {what} could not be sent; every figure is in metrics.jsonl and eval.jsonl of the "
                "output directory"
            )

    def _work(self) -> None:
        """The thread. A record that failed `TRIES` times is tried in turn with the next one: where that is taken, the
        tracker refuses the first."""
        while not self._ended:
            if not self._taken or (len(self._taken) == 1 and self._failures >= TRIES and self._records):
                self._take()
            turn = self._failures % len(self._taken)
            if not self._attempt(self._taken[turn]):
                self._pause()
                continue
            with self._changed:
                self._lost += sum(not isinstance(record, str) for record in self._taken[:turn])
                del self._taken[: turn + 1]

    def _take(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._records)
            self._taken.append(self._records.popleft())

    def _attempt(self, record: Record | str) -> bool:
        """One call of the library; whether it succeeded."""
        self._calling = time.monotonic()
        try:
            if self.session is None:
                self.session = self.open(self._step)
            if record == END:
                self.end()
                self._ended = True
            elif not isinstance(record, str):
                self.send(*record)
                self._step = max(self._step, record[1])
        except BaseException as error:  # a tracker's library may raise anything, SystemExit too; the run does not end
            self._failures += 1
            if self.reopens:
                self.session = None
            self._warn(f"failed ({type(error).__name__}: {first_line(error)})")
            return False
        finally:
            self._calling = 0.0
        if self._told:
            print_line(f"{self.title} answers again")
        self._told = False
        self._failures = 0
        return True

    def _warn(self, what: str) -> None:
        """One line an outage."""
        if not self._told:
            self._told = True
            print_warning(
                f"{self.title} {what}; training goes on, and its records are sent as soon as possible. Every figure is "
                "in metrics.jsonl too"
            )

    def _pause(self) -> None:
        seconds = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** min(self._failures - 1, 10))
        with self._changed:
            self._changed.wait_for(lambda: self._closing, seconds)
        if self._closing:
            time.sleep(FIRST_RETRY_S)

    @abstractmethod
    def open(self, step: int) -> Any:
        """Returns the tracker's own object, for a run that starts after `step`. Called again after a failure."""

    @abstractmethod
    def send(self, scalars: dict[str, float], step: int) -> None:
        """Writes the figures of a step."""

    @abstractmethod
    def end(self) -> None:
        """Flush and end a run that was opened."""


class TensorBoard(TrackerHook):
    """Event files in `directory`; events past the checkpoint are hidden by `purge_step`."""

    reopens = True

    def open(self, step: int) -> Any:
        """Opens a new event file."""
        from torch.utils.tensorboard import SummaryWriter

        threading.excepthook = _thread_error
        return SummaryWriter(str(self.directory), purge_step=step + 1)

    def send(self, scalars: dict[str, float], step: int) -> None:
        """Write one event for each figure."""
        for name, value in scalars.items():
            self.session.add_scalar(name, value, step)

    def end(self) -> None:
        """Flush the events."""
        self.session.close()


@dataclass(frozen=True)
class TrackedRun:
    """The facts of a run that online trackers show. Those not set come from the trackers' environment variables."""

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
        """Return a random id that OUT/<tracker>/run-id keeps, so that a resumed run goes on as the same one."""
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
        """Start a new run, or resume the one of an earlier start."""
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
        """Send one record."""
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
        """Start a new run, or resume the one of an earlier start."""
        import swanlab

        hook = sys.excepthook
        places = self.run.places
        token = places.swanlab_token
        session = swanlab.init(
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
        sys.excepthook = hook  # SwanLab's own one waits for its server before the error is shown
        return session

    def send(self, scalars: dict[str, float], step: int) -> None:
        """Send one record."""
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
        self.parent: str | None = None
        """The run of the program that trains, if any."""
        self.parameters: list[tuple[str, Any]] = []
        """The parameters of a new run that were not sent yet."""
        self.started: Any = None

    def prepare(self) -> None:
        """Notes the active run of this thread: MLflow keeps one a thread."""
        if (mlflow := sys.modules.get("mlflow")) is not None:
            active = mlflow.active_run()
            self.parent = None if active is None else active.info.run_id

    def open(self, step: int) -> Any:
        """Makes a new run, or continues the one of an earlier start; after a failure goes on where it stopped."""
        import mlflow

        if self.started is None:
            if self.run.places.mlflow_tracking_uri is not None:
                mlflow.set_tracking_uri(self.run.places.mlflow_tracking_uri)
            if self.run.places.mlflow_experiment_name is not None:
                mlflow.set_experiment(self.run.places.mlflow_experiment_name)
            file = self.directory / "mlflow" / "run-id"
            if file.exists():
                self.started = mlflow.start_run(run_id=file.read_text(encoding="utf-8"))
                return self.started
            self.started = mlflow.start_run(run_name=self.run.title, parent_run_id=self.parent)
            file.parent.mkdir(exist_ok=True)
            file.write_text(self.started.info.run_id, encoding="utf-8")
            self.parameters = [
                (f"{section}.{name}" if isinstance(values, Mapping) else section, value)
                for section, values in self.run.config.items()
                for name, value in (values.items() if isinstance(values, Mapping) else [("", values)])
            ]
        while self.parameters:
            mlflow.log_params(dict(self.parameters[:PARAMETERS]))
            del self.parameters[:PARAMETERS]
        return self.started

    def send(self, scalars: dict[str, float], step: int) -> None:
        """Send the figures in one request."""
        import mlflow

        mlflow.log_metrics(scalars, step=step, run_id=self.session.info.run_id)

    def end(self) -> None:
        """Ends the run."""
        import mlflow

        mlflow.end_run()


class Trackio(TrackerHook):
    """Trackio: a store on this machine, or a Space on Hugging Face.

    The package finds a run to resume by its name, which several runs of a project may have. Here the id decides: it is
    set before the first record.
    """

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run.directory)
        self.run = run

    def open(self, step: int) -> Any:
        """Start a new run, or resume the one of an earlier start."""
        import trackio

        places = self.run.places
        session = trackio.init(
            project=places.trackio_project,
            name=self.run.title,
            space_id=places.trackio_space_id,
            private=True,
            config=dict(self.run.config),
            embed=False,
        )
        session.id = self.run.identity("trackio")
        return session

    def send(self, scalars: dict[str, float], step: int) -> None:
        """Send one record."""
        self.session.log(scalars, step=step)

    def end(self) -> None:
        """Ends the run."""
        self.session.finish()


class Prometheus(TrackerHook):
    """A page for a Prometheus server to read: the latest figures as gauges, labeled with the name of the run."""

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run.directory)
        self.run = run
        self.gauges: dict[str, Any] = {}

    def open(self, step: int) -> Any:
        """Start to listen; the page begins with the step."""
        from prometheus_client import CollectorRegistry, start_http_server

        self.registry = CollectorRegistry()
        self.gauges = {}
        self.send({}, step)
        places = self.run.places
        server, _ = start_http_server(places.prometheus_port, places.prometheus_host, self.registry)
        return server

    def send(self, scalars: dict[str, float], step: int) -> None:
        """Set the gauges."""
        from prometheus_client import Gauge

        for figure, value in {**scalars, "step": float(step)}.items():
            name = "megaswift_" + re.sub(r"\W", "_", figure, flags=re.ASCII)
            if name not in self.gauges:
                self.gauges[name] = Gauge(name, figure, ["run"], registry=self.registry)
            self.gauges[name].labels(self.run.title).set(value)

    def end(self) -> None:
        """Stop to listen."""
        self.session.shutdown()
        self.session.server_close()


ONLINE: dict[str, Callable[[TrackedRun], TrackerHook]] = {
    "wandb": WandB,
    "swanlab": SwanLab,
    "mlflow": MLflow,
    "trackio": Trackio,
    "prometheus": Prometheus,
}


def tracker_hooks(report_to: Sequence[str], run: TrackedRun) -> list[Hook]:
    """Build the hooks for `report_to`, which `preflight` has checked. They end together."""
    events = Path(run.places.tensorboard_dir or run.directory / "runs")
    hooks: list[TrackerHook] = [TensorBoard(events)] if "tensorboard" in report_to else []
    hooks += [make(run) for name, make in ONLINE.items() if name in report_to]
    group = TrackerGroup()
    return [hook.join(group) for hook in hooks]
