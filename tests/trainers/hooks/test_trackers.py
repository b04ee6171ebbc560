"""TensorBoard holds the lines of metrics.jsonl, read back by TensorBoard's own reader."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaswift import distributed, error_exit
from megaswift.config import load_config
from megaswift.models.flops import StepFlopFormula
from megaswift.run.course import end_trackers
from megaswift.trainers.hook import Hook
from megaswift.trainers.hooks import trackers
from megaswift.trainers.hooks.metrics import MetricsJsonlHook, ThroughputFormula, read_lines
from megaswift.trainers.hooks.trackers import (
    WRITER_THREAD,
    Prometheus,
    TensorBoard,
    TrackedRun,
    TrackerHook,
    scalars_of,
    tracker_hooks,
)
from megaswift.trainers.loop import train
from megaswift.trainers.options.tracker import TrackerConfig
from tests.sources import ROOT
from tests.trainers.tiny import tiny_loop


def test_events_are_the_lines(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = MetricsJsonlHook(tmp_path / "m.jsonl", 2, ThroughputFormula([StepFlopFormula(1, 1)], 1), "label_weight")
    train(tiny_loop(4, metrics, TensorBoard(tmp_path / "runs")))
    events = EventAccumulator(str(tmp_path / "runs")).Reload()
    lines = read_lines(tmp_path / "m.jsonl")
    for name in ("loss", "grad_norm", "tokens", "token_accuracy"):
        found = [(e.step, e.value) for e in events.Scalars(f"train/{name}")]
        assert [s for s, _ in found] == [2, 4]
        assert [v for _, v in found] == pytest.approx([line[name] for line in lines])
    assert "train/mfu" not in events.Tags()["scalars"]


def test_only_numbers_are_sent() -> None:
    line = {"step": 3, "loss": 1.5, "mfu": None, "text": "x", "flag": True, "tokens": 7}
    assert scalars_of("train", line) == {"train/loss": 1.5, "train/tokens": 7}


def test_report_to_chooses(tmp_path: Path) -> None:
    run = TrackedRun(tmp_path, {})
    assert [type(h).__name__ for h in tracker_hooks(("tensorboard",), run)] == ["TensorBoard"]
    assert tracker_hooks((), run) == []
    assert [type(h).__name__ for h in tracker_hooks(("wandb",), run)] == ["WandB"]
    several = tracker_hooks(("trackio", "mlflow", "swanlab", "tensorboard"), run)
    assert [type(h).__name__ for h in several] == ["TensorBoard", "SwanLab", "MLflow", "Trackio"]
    assert (run.title, TrackedRun(tmp_path, {}, "mine").title) == (tmp_path.name, "mine")
    assert run.identity("wandb") == run.identity("wandb") != run.identity("swanlab")


class Recorded:
    """Stands for a tracker's module: keeps what its functions are called with."""

    def __init__(self) -> None:
        self.calls: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*words: Any, **how: Any) -> Any:
            self.calls[name] = words or how
            return SimpleNamespace(define_metric=lambda *a, **k: None, info=SimpleNamespace(run_id="r"))

        return call


def test_projects_owners_and_servers_reach_the_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        "--report_to wandb swanlab mlflow trackio tensorboard --wandb_project p --wandb_entity e --swanlab_project q"
    )
    words += " --trackio_project r --trackio_space_id o/s"
    more = (
        "--swanlab_workspace w --swanlab_mode cloud --swanlab_token t --mlflow_tracking_uri http://h --tensorboard_dir"
    )
    line = [*words.split(), *more.split(), str(tmp_path / "t"), "--mlflow_experiment_name x", "--wandb_exp_name=n"]
    line[-2:-1] = line[-2].split()
    cfg = load_config("sft", line, environ={})
    assert "swanlab_token" not in str(cfg.to_dict())
    run = TrackedRun(tmp_path, {}, cfg.trackers.run_name, cfg.trackers)
    events, *online = tracker_hooks(cfg.trackers.report_to, run)
    assert isinstance(events, TensorBoard) and events.directory == tmp_path / "t"
    modules = {name: Recorded() for name in ("wandb", "swanlab", "mlflow", "trackio")}
    for name, module in modules.items():
        real = importlib.import_module(name) if importlib.util.find_spec(name) else None
        if real is not None and name in ("wandb", "swanlab"):
            known = inspect.signature(real.init).parameters
            assert {"project", "entity" if name == "wandb" else "workspace", "mode", "settings"} <= known.keys()
        monkeypatch.setitem(sys.modules, name, module)
    modules["mlflow"].calls["active_run"] = None
    for hook in online:
        hook.open(0)  # type: ignore[attr-defined]
    assert modules["wandb"].calls["init"].items() >= {"project": "p", "entity": "e", "name": "n"}.items()
    found = modules["swanlab"].calls
    assert found["init"].items() >= {"project": "q", "workspace": "w", "mode": "online", "name": "n"}.items()
    assert found["Settings"] == {"api_key": "t"} and found["init"]["settings"] is not None
    found = modules["mlflow"].calls
    assert (found["set_tracking_uri"], found["set_experiment"]) == (("http://h",), ("x",))
    found = modules["trackio"].calls["init"]
    assert found.items() >= {"project": "r", "space_id": "o/s", "private": True, "name": "n"}.items()


def records(data: bytes) -> Iterator[bytes]:
    """Records of LevelDB's log format after 7 bytes of their own: blocks of 32 KiB; checksum (4), length (2), 1 whole
    or 2, 3, 4 pieces."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if at % 32768 > 32768 - 7:
            at += -at % 32768
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield whole
            whole = b""


def sent(folder: Path) -> list[dict[str, Any]]:
    """What an offline run of Weights & Biases kept to send."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for data in records(next(folder.glob("wandb/offline-run-*/*.wandb")).read_bytes()):
        record = Record.FromString(data)
        if record.HasField("history"):
            found.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
    return found


RESUMED = """
import sys
from pathlib import Path
from megaswift.trainers.hooks.trackers import SwanLab, TrackedRun, WandB
from tests.trainers.tiny import tiny_loop

hook, loop = WandB(TrackedRun(Path(sys.argv[1]), {"lr": 0.1})), tiny_loop(4)
hook.on_start(loop)
for step in (1, 2, 3, 4, 3, 4, 5):
    hook.on_log(loop, {"step": step, "loss": 10.0 * step, "mfu": None})
hook.on_evaluate(loop, {"step": 5, "loss": 7.0})
hook.close()
"""


@pytest.mark.process
@pytest.mark.slow
def test_steps_that_a_resumed_run_repeats_arrive_in_weights_and_biases(tmp_path: Path) -> None:
    """The service refuses a smaller step than its last one. One session stands for the run that goes on under the same
    id.

    In a process of its own: the package keeps a service and settings for the whole process.
    """
    environ = os.environ | {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_CONSOLE": "off",
        "PYTHONPATH": str(ROOT),
    }
    subprocess.run([sys.executable, "-c", RESUMED, str(tmp_path)], cwd=ROOT, env=environ, check=True, timeout=240)
    found = sent(tmp_path)
    assert [(r["step"], r["train/loss"]) for r in found if "train/loss" in r] == [
        (s, 10.0 * s) for s in (1, 2, 3, 4, 3, 4, 5)
    ]
    assert [(r["step"], r["eval/loss"]) for r in found if "eval/loss" in r] == [(5, 7.0)]


@pytest.mark.process
@pytest.mark.slow
def test_swanlab_has_every_line(tmp_path: Path) -> None:
    """Its offline file, in a process of its own as above."""
    environ = os.environ | {"SWANLAB_MODE": "offline", "PYTHONPATH": str(ROOT)}
    program = RESUMED.replace("WandB(", "SwanLab(", 1)
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, env=environ, check=True, timeout=240)
    (file,) = (tmp_path / "swanlab").rglob("*.swanlab")
    content = file.read_bytes()
    assert (tmp_path / "swanlab" / "run-id").read_text() in file.name
    assert content.count(b"train/loss") >= 5 and content.count(b"eval/loss") >= 1


def exit_code_of(program: str, folder: Path, environ: dict[str, str]) -> int:
    """Runs a program on the folder in a process of its own."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", program, str(folder)]
    return subprocess.run(command, cwd=ROOT, env=environ | {"PYTHONPATH": paths}, timeout=240).returncode


ML = """
import sys
from pathlib import Path
import mlflow
from megaswift.trainers.hooks.trackers import MLflow, TrackedRun
from tests.trainers.tiny import tiny_loop

out = Path(sys.argv[1])
for first, steps, rate in ((0, (1, 2, 3), 0.1), (2, (3, 4), 0.2)):
    config = {"optim": {f"option_{n}": n for n in range(150)} | {"learning_rate": rate}, "task": "sft"}
    hook, loop = MLflow(TrackedRun(out, config, "mine")), tiny_loop(4)
    loop.step = first
    hook.on_start(loop)
    for step in steps:
        hook.on_log(loop, {"step": step, "loss": 10.0 * step, "mfu": None, "rewards/chosen": 1.0})
    hook.on_evaluate(loop, {"step": steps[-1], "loss": 7.0})
    hook.close()
(run,) = mlflow.search_runs(output_format="list")
history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "train/loss")
assert [(m.step, m.value) for m in history] == [(s, 10.0 * s) for s in (1, 2, 3, 3, 4)], history
assert run.data.metrics["eval/loss"] == 7.0 and run.data.metrics["train/rewards/chosen"] == 1.0
assert "train/mfu" not in run.data.metrics and run.info.run_name == "mine" and run.info.status == "FINISHED"
assert run.data.params["optim.learning_rate"] == "0.1" and run.data.params["task"] == "sft"
assert len(run.data.params) == 152 and run.info.run_id == (out / "mlflow" / "run-id").read_text()
"""


@pytest.mark.process
@pytest.mark.slow
def test_mlflow_has_one_run_with_all_starts(tmp_path: Path) -> None:
    """Its own client and a database beside it, in a process of its own."""
    if importlib.util.find_spec("mlflow") is None:
        pytest.skip("mlflow is not installed: pip install mlflow-skinny sqlalchemy alembic")
    assert exit_code_of(ML, tmp_path, os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/runs.db"}) == 0


TRACKIO = """
import socket, sys
from pathlib import Path

reached = []
socket.socket.connect = socket.socket.connect_ex = lambda self, address: reached.append(address) or 111

import trackio
from megaswift.trainers.hooks.trackers import TrackedRun, Trackio
from tests.trainers.tiny import tiny_loop

folder = Path(sys.argv[1])
starts = ((folder / "a/out", 0, (1, 2, 3)), (folder / "b/out", 0, (1,)), (folder / "a/out", 2, (3, 4)))
for out, first, steps in starts:
    out.mkdir(parents=True, exist_ok=True)
    hook, loop = Trackio(TrackedRun(out, {"optim": {"learning_rate": 0.1 + first}, "task": "sft"})), tiny_loop(4)
    loop.step = first
    hook.on_start(loop)
    for step in steps:
        hook.on_log(loop, {"step": step, "loss": 10.0 * step, "mfu": None, "rewards/chosen": 1.0})
    hook.on_evaluate(loop, {"step": steps[-1], "loss": 7.0})
    hook.close()
ids = [(folder / name / "out/trackio/run-id").read_text() for name in "ab"]
found = {run.id: run for run in trackio.Api().runs("megaswift")}
assert sorted(found) == sorted(ids) and {run.name for run in found.values()} == {"out"}, found
assert [found[i].config["optim"]["learning_rate"] for i in ids] == [2.1, 0.1]
from trackio.sqlite_storage import SQLiteStorage
lines = [SQLiteStorage.get_logs("megaswift", "out", run_id=i) for i in ids]
values = [[(line["step"], line["train/loss"]) for line in of if "train/loss" in line] for of in lines]
assert values == [[(s, 10.0 * s) for s in (1, 2, 3, 3, 4)], [(1, 10.0)]], values
assert [(line["step"], line["eval/loss"]) for line in lines[0] if "eval/loss" in line] == [(3, 7.0), (4, 7.0)]
assert lines[0][0]["train/rewards/chosen"] == 1.0 and not any("train/mfu" in line for line in lines[0])
assert reached == [], reached
"""


@pytest.mark.process
@pytest.mark.slow
def test_trackio_has_one_run_with_all_starts_on_this_machine(tmp_path: Path) -> None:
    """Two runs of the same name, the first of which is resumed; nothing leaves the machine."""
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("trackio is not installed: pip install trackio")
    own = {"TRACKIO_DIR": str(tmp_path / "store"), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    environ = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "TRACKIO_SPACE_ID")} | own
    assert exit_code_of(TRACKIO, tmp_path, environ) == 0


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_under_the_writer_thread_is_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread's OSError reaches the next write and prints no traceback of its own; a new event file has the rest."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr(trackers, "FIRST_RETRY_S", 0.01)
    board = TensorBoard(tmp_path)
    board.on_start(SimpleNamespace(step=0))
    wait_until(lambda: board.session is not None)
    thread = board.session._get_file_writer().event_writer._async_writer._worker
    assert type(thread).__name__ == WRITER_THREAD

    def full(data: bytes) -> None:
        raise OSError(28, "No space left on device")

    thread._record_writer.write = full
    board.on_log(SimpleNamespace(), {"step": 1, "loss": 1.0})
    thread.join(300)
    for step in (2, 3):
        board.on_log(SimpleNamespace(), {"step": step, "loss": 1.0})
    board.close()
    said = capsys.readouterr().err
    assert "Traceback" not in said and said.count("warning") == 1 and "TensorBoard failed (OSError" in said
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [e.step for e in events.Scalars("train/loss")][-2:] == [2, 3]


@pytest.mark.wide
def test_prometheus_reads_the_latest_figures(tmp_path: Path) -> None:
    """Its own parser reads the page; a server that ended frees its port for the next."""
    from urllib.request import urlopen

    from prometheus_client.parser import text_string_to_metric_families

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = TrackedRun(tmp_path, {}, 'a "run"', TrackerConfig(prometheus_port=port))
    for _ in range(2):
        (hook,) = tracker_hooks(("prometheus",), run)
        assert isinstance(hook, Prometheus)
        hook.on_start(SimpleNamespace(step=3))
        hook.on_log(SimpleNamespace(), {"step": 4, "loss": 1.5, "time/training": 0.5, "name": "x"})
        hook.on_log(SimpleNamespace(), {"step": 5, "loss": 1.25})
        hook.on_evaluate(SimpleNamespace(), {"step": 5, "loss": 2.0})
        wait_until(lambda hook=hook: "megaswift_eval_loss" in hook.gauges)
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            page = answer.read().decode()
        (server,) = {hook.session.server_address[0]}
        found = {(s.name, s.labels["run"]): s.value for f in text_string_to_metric_families(page) for s in f.samples}
        assert server == "127.0.0.1" and found == {
            ("megaswift_step", 'a "run"'): 5.0,
            ("megaswift_train_loss", 'a "run"'): 1.25,
            ("megaswift_train_time_training", 'a "run"'): 0.5,
            ("megaswift_eval_loss", 'a "run"'): 2.0,
        }
        hook.close()
    with pytest.raises(OSError, match="refused"):
        urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30)


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


class Fake(TrackerHook):
    """A tracker whose calls do what a test wants."""

    def __init__(self) -> None:
        super().__init__(Path())
        self.sent: list[int] = []
        self.threads: set[int] = set()
        self.opened = self.ended = 0
        self.fails: Callable[[str, int], None] = lambda call, step: None

    def _call(self, name: str, step: int) -> None:
        self.threads.add(threading.get_ident())
        self.fails(name, step)

    def open(self, step: int) -> Any:
        self.opened += 1
        self._call("open", step)
        return self

    def send(self, scalars: dict[str, float], step: int) -> None:
        self._call("send", step)
        self.sent.append(step)

    def end(self) -> None:
        self._call("end", 0)
        self.ended += 1


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(trackers, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(trackers, "END_S", 1.0)
    yield
    error_exit.calls_left_behind.clear()


def lines(hook: Hook, tmp_path: Path) -> MetricsJsonlHook:
    return MetricsJsonlHook(tmp_path / "m.jsonl", 1, ThroughputFormula([StepFlopFormula(1, 1)], 1), "label_weight")


class Outage(BaseException):
    """No Exception."""


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("error", [RuntimeError, SystemExit, KeyboardInterrupt, Outage, MemoryError, StopIteration])
@pytest.mark.parametrize("call", ["open", "send", "end"])
def test_an_outage_is_one_warning_and_everything_arrives(
    call: str, error: type[BaseException], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hook, failures = Fake(), iter([error("the server is away")] * 4)

    def fails(name: str, step: int) -> None:
        if name == call and step != 1 and (failure := next(failures, None)) is not None:
            raise failure

    hook.fails = fails
    loop = tiny_loop(4, lines(hook, tmp_path), hook)
    train(loop)
    said = capsys.readouterr().err
    assert hook.sent == [1, 2, 3, 4] and hook.ended == 1 and loop.step == 4
    assert said.count(f"warning: Fake failed ({error.__name__}: the server is away)") == said.count("warning") == 1
    assert "Fake answers again" in said and "metrics.jsonl" in said and "could not be sent" not in said
    assert len(hook.threads) == 1 and threading.get_ident() not in hook.threads


@pytest.mark.wide
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("call", ["open", "send", "end"])
def test_a_tracker_that_never_answers_ends_and_delays_no_run(
    call: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hook, forever = Fake(), threading.Event()

    def fails(name: str, step: int) -> None:
        if name == call:
            forever.wait(300)

    hook.fails, began = fails, time.monotonic()
    loop = tiny_loop(4, lines(hook, tmp_path), hook)
    train(loop)
    assert loop.step == 4 and time.monotonic() - began < 100
    said = capsys.readouterr().err
    what = "the end of the run" if call == "end" else "4 records"
    assert f"Fake: {what} could not be sent; every figure is in metrics.jsonl and eval.jsonl" in said
    assert error_exit.calls_left_behind == ["Fake"]
    forever.set()


@pytest.mark.wide
@pytest.mark.usefixtures("quick")
def test_a_tracker_that_is_away_until_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hook = Fake()

    def fails(name: str, step: int) -> None:
        if step >= 3:
            raise ConnectionError("refused")

    hook.fails = fails
    train(tiny_loop(6, lines(hook, tmp_path), hook))
    said = capsys.readouterr().err
    assert hook.sent == [1, 2] and said.count("warning") == 2
    assert "Fake: 4 records could not be sent" in said and hook.ended == 0


@pytest.mark.usefixtures("quick")
def test_a_record_that_is_refused_holds_up_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hook = Fake()

    def fails(name: str, step: int) -> None:
        if name == "send" and step == 2:
            raise ValueError("not a number")

    hook.fails = fails
    train(tiny_loop(5, lines(hook, tmp_path), hook))
    assert hook.sent == [1, 3, 4, 5] and hook.ended == 1
    assert "Fake: 1 record could not be sent" in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_what_waits_is_bounded(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "MOST_WAITING", 5)
    monkeypatch.setattr(trackers, "SLOW_S", 0.0)
    hook, go = Fake(), threading.Event()
    hook.fails = lambda name, step: None if go.wait(300) else None
    hook.on_start(SimpleNamespace(step=0))
    wait_until(lambda: hook.opened == 1)
    for step in range(1, 21):
        hook.on_log(SimpleNamespace(), {"step": step})
    go.set()
    hook.close()
    assert hook.sent == [16, 17, 18, 19, 20]
    said = capsys.readouterr().err
    assert said.count("Fake has not answered for 0 s") == 1 and "Fake: 15 records could not be sent" in said


def test_at_most_ten_thousand_records_wait(capsys: pytest.CaptureFixture[str]) -> None:
    """The bound as it is shipped, which keeps the memory of a long outage small."""
    hook, go = Fake(), threading.Event()
    hook.fails = lambda name, step: None if go.wait(300) else None
    hook.on_start(SimpleNamespace(step=0))
    wait_until(lambda: hook.opened == 1)
    for step in range(1, 12_001):
        hook.on_log(SimpleNamespace(), {"step": step})
    go.set()
    hook.close()
    assert hook.sent == list(range(2_001, 12_001))
    assert "Fake: 2,000 records could not be sent" in capsys.readouterr().err


@pytest.mark.parametrize("count", [1, 3])
def test_trackers_delay_the_end_by_thirty_seconds(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound as it is shipped, on a clock that only waiting moves."""
    clock = [100.0]

    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        clock[0] += timeout or 0.0

    monkeypatch.setattr(trackers, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    go = threading.Event()
    hooks = [Fake() for _ in range(count)]
    for hook in hooks:
        hook.join(hooks[0].group)
        hook.fails = lambda name, step: None if go.wait(300) else None
        hook.on_start(SimpleNamespace(step=0))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "join", join)
        end_trackers(hooks)
    go.set()
    assert clock[0] == 130.0
    error_exit.calls_left_behind.clear()


@pytest.mark.wide
@pytest.mark.usefixtures("quick")
def test_trackers_share_the_time_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "END_S", 4.0)
    forever = threading.Event()
    made = [Fake() for _ in range(6)]
    for hook in made:
        hook.fails = lambda name, step: None if forever.wait(300) else None
    made[5].fails = lambda name, step: None
    monkeypatch.setattr(trackers, "ONLINE", {str(i): lambda run, hook=hook: hook for i, hook in enumerate(made)})
    hooks = tracker_hooks("012345", TrackedRun(tmp_path, {}))
    loop = tiny_loop(2, lines(made[0], tmp_path), *hooks)
    began = time.monotonic()
    train(loop)
    assert time.monotonic() - began < 5 * 4 and made[5].sent == [1, 2] and made[5].ended == 1
    forever.set()


@pytest.mark.usefixtures("quick")
def test_other_ranks_do_not_wait_for_a_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the loop comes the export, which is collective."""
    monkeypatch.setattr(trackers, "END_S", 120.0)
    hook, go = Fake(), threading.Event()
    hook.fails = lambda name, step: None if go.wait(300) else None
    hook.on_start(SimpleNamespace(step=0))
    monkeypatch.setattr(distributed, "global_world_size", lambda: 2)
    began = time.monotonic()
    hook.close()
    assert time.monotonic() - began < 60
    go.set()
    hook.wait()
    assert hook.ended == 1 and error_exit.calls_left_behind == []


@pytest.mark.process
@pytest.mark.parametrize(("end", "code"), [("'--version'", 0), ("'no-such-command'", 2)])
def test_what_a_library_waits_for_at_exit_delays_no_command(end: str, code: int) -> None:
    """swanlab and wandb end their run at exit, behind a lock that a call which does not return holds."""
    program = (
        "import atexit, sys, time; from megaswift import cli, error_exit; atexit.register(time.sleep, 300); "
        f"error_exit.calls_left_behind.append('SwanLab'); sys.argv = ['megaswift', {end}]; sys.exit(cli.main())"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=300, capture_output=True, text=True)
    assert done.returncode == code and done.stdout + done.stderr
