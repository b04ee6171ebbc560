"""The bar and the plain lines: what is shown where, and how often."""

from __future__ import annotations

import fcntl
import io
import math
import os
import pty
import struct
import termios
from pathlib import Path
from typing import Any, TextIO

import pytest

from megaswift import log
from megaswift.log import LogFile
from megaswift.models.flops import StepFlopFormula
from megaswift.trainers.hooks.metrics import MetricsJsonlHook, ThroughputFormula
from megaswift.trainers.hooks.progress import Progress, duration_text, print_line, progress_figures
from megaswift.trainers.loop import train
from tests.trainers.tiny import tiny_loop


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: TextIO, path: Path, steps: int = 5, every: float = 0.0) -> str:
    lines = MetricsJsonlHook(path, 1, ThroughputFormula([StepFlopFormula(1, 1)], 1), "label_weight")
    train(tiny_loop(steps, lines, Progress(stream, every)))
    return stream.getvalue() if isinstance(stream, io.StringIO) else ""


def test_a_terminal_gets_a_bar_with_loss_rate_speed_and_time_left(tmp_path, monkeypatch) -> None:  # noqa: ANN001
    monkeypatch.setattr(log, "LOG_FILE", LogFile())
    log.LOG_FILE.open(tmp_path / "train.log")
    text = shown(Terminal(), tmp_path / "m.jsonl")
    last = text.split("\r")[-1]
    assert "step 5/5  loss " in (tmp_path / "train.log").read_text()  # in plain lines there too
    assert "5/5" in last and "loss " in last and "lr 2.00e-03" in last and "tokens/s" in last and "<" in last
    assert "\nstep" not in text


@pytest.mark.parametrize("size", [(0, 0), (24, 120)])
def test_a_terminal_of_unknown_size_gets_the_bar_too(tmp_path: Path, size: tuple[int, int]) -> None:
    """As `docker run -t` in a job makes it, or `script`."""
    mine, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    with open(theirs, "w") as stream:
        shown(stream, tmp_path / "m.jsonl")
        text = ""
        while not text.endswith("\n"):  # a terminal hands over what it has so far; the end of the bar is a new line
            text += os.read(mine, 1 << 16).decode()
    os.close(mine)
    last = text.strip().split("\r")[-1]
    assert "| 5/5 [" in last and "] loss " in last and "tokens/s" in last and " ," not in text


def test_elsewhere_there_are_plain_lines_now_and_then(tmp_path) -> None:  # noqa: ANN001
    lines = [line for line in shown(io.StringIO(), tmp_path / "a.jsonl").splitlines() if "loss" in line]
    assert (
        len(lines) == 5
        and lines[0].startswith("step 1/5  loss ")
        and "ETA 0:0" in lines[0]
        and "\r" not in "".join(lines)
    )
    lines = shown(io.StringIO(), tmp_path / "b.jsonl", every=60).splitlines()
    assert [line.split()[1] for line in lines] == ["1/5", "5/5"]  # the first and the last, whatever the interval


def test_steps_that_are_not_logged_are_not_silent(tmp_path: Path) -> None:
    """With --logging_steps 100, or steps of minutes."""
    stream = io.StringIO()
    lines = MetricsJsonlHook(tmp_path / "m.jsonl", 4, ThroughputFormula([StepFlopFormula(1, 1)], 1), "label_weight")
    train(tiny_loop(5, lines, Progress(stream, 0.0)))
    said = [line.partition("  loss ")[0] for line in stream.getvalue().splitlines()]
    assert said[:4] == ["step 1/5", "step 2/5", "step 3/5", "step 4/5"]
    assert "step 4/5  loss " in stream.getvalue()
    quiet = io.StringIO()
    train(tiny_loop(5, MetricsJsonlHook(tmp_path / "n.jsonl", 4, lines.speed, "label_weight"), Progress(quiet)))
    assert all("loss" in line for line in quiet.getvalue().splitlines()), "within the first seconds"


def test_an_evaluation_is_not_silent() -> None:
    stream = io.StringIO()
    loop, progress = tiny_loop(5), Progress(stream, 0.0)
    progress.on_start(loop)
    for count in (1, 2):
        progress.on_evaluation_batch(loop, count)
    assert stream.getvalue() == "step 0: evaluation, batch 1\nstep 0: evaluation, batch 2\n"


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError("nobody reads")


def test_a_reader_that_leaves_does_not_end_a_run(tmp_path) -> None:  # noqa: ANN001
    """As in `megaswift sft run.yaml 2>&1 | head -3`, which ended with exit code 0 and no export."""
    shown(Closed(), tmp_path / "m.jsonl")
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 5


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (425, "7:05"), (7424, "2:03:44"), (273_900, "3d 04:05"), (-1, "0:00")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_a_loss_that_is_not_finite_is_shown() -> None:
    assert (
        progress_figures({"loss": None, "learning_rate": 1e-5, "tokens_per_second": 1234.5})
        == "loss nan  lr 1.00e-05  1,234 tokens/s"
    )


def test_pairs_say_how_often_the_chosen_answer_is_first(capsys: pytest.CaptureFixture[str]) -> None:
    loop: Any = None
    line = {"step": 4, "loss": 0.5, "label_tokens": 400, "batches": 2}
    Progress(io.StringIO()).on_evaluate(loop, {**line, "rewards/accuracies": 0.97})
    Progress(io.StringIO()).on_evaluate(loop, {**line, "accuracy": 0.97, "mean_reward": 0.5})
    Progress(io.StringIO()).on_evaluate(loop, {**line, "accuracy": 0.97})
    Progress(io.StringIO()).on_evaluate(loop, line)
    assert capsys.readouterr().err == (
        "megaswift: step 4: evaluation loss 0.5000  reward accuracy 97% over 400 label tokens\n"
        "megaswift: step 4: evaluation loss 0.5000  reward accuracy 97% over 400 label tokens\n"
        "megaswift: step 4: evaluation loss 0.5000  accuracy 97% over 400 label tokens\n"
        "megaswift: step 4: evaluation loss 0.5000 over 400 label tokens\n"
    )


def test_losses_of_prediction_layers_stand_beside_the_loss(capsys: pytest.CaptureFixture[str]) -> None:
    loop: Any = None
    line = {
        "step": 4,
        "loss": 0.5,
        "label_tokens": 400,
        "batches": 2,
        "mtp_1_loss": 0.75,
        "mtp_2_loss": None,
        "mtp_1_weight": 9.0,
    }
    figures = progress_figures({**line, "learning_rate": 1e-5, "tokens_per_second": 1234.5})
    assert figures == "loss 0.5000  mtp 0.7500/nan  lr 1.00e-05  1,234 tokens/s"
    Progress(io.StringIO()).on_evaluate(loop, {**line, "mtp_2_loss": 1.0})
    assert capsys.readouterr().err == (
        "megaswift: step 4: evaluation loss 0.5000  mtp 0.7500/1.0000 over 400 label tokens\n"
    )


def test_an_evaluation_of_prompts_with_and_without_a_reward(capsys: pytest.CaptureFixture[str]) -> None:
    """Every function may have returned None: there is no reward then, and no label tokens either."""
    line = {"step": 4, "epoch": 1.0, "loss": math.nan, "prompts": 10, "seconds": 1.0}
    loop: Any = None
    Progress(io.StringIO()).on_evaluate(loop, line)
    Progress(io.StringIO()).on_evaluate(loop, {**line, "reward": 0.5})
    assert capsys.readouterr().err == (
        "megaswift: step 4: evaluation reward none over 10 prompts\n"
        "megaswift: step 4: evaluation reward 0.5000 over 10 prompts\n"
    )


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    print_line("hello")
    monkeypatch.setenv("RANK", "1")
    print_line("not me")
    assert capsys.readouterr().err == "megaswift: hello\n"
