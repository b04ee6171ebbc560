"""Progress on rank 0: a bar on a terminal, otherwise plain lines at intervals, which the log file always gets.

Owns the only writes to the terminal inside the loop (`print_line`, `print_warning`), so that messages do not cut the
bar.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from typing import TextIO

from tqdm import tqdm

from megaswift import distributed, log
from megaswift.trainers.hook import Hook, Line, Run, StepRecord

BAR = "{percentage:3.0f}%|{bar:24}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}] {desc}"
PREDICTION_LOSS = re.compile(r"mtp_(\d+)_loss")
UNKNOWN_COLUMNS = 120
"""Width of the bar in a terminal that does not give its size."""
PLAIN_SECONDS = 10.0
"""At least so long between two plain lines."""


def print_line(text: str) -> None:
    """Print a message to the user without cutting the bar."""
    with tqdm.external_write_mode(file=sys.stderr):
        log.info(text)


def print_warning(text: str) -> None:
    """Print a warning to the user without cutting the bar."""
    with tqdm.external_write_mode(file=sys.stderr):
        log.warn(text)


def duration_text(seconds: float) -> str:
    """Write a duration as `0:42`, `7:05`, `2:03:44` or `3d 04:05`."""
    s = round(max(seconds, 0.0))
    days = s // 86400
    hours = s // 3600 % 24
    minutes = s // 60 % 60
    if days:
        return f"{days}d {hours:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{s % 60:02d}" if hours else f"{minutes}:{s % 60:02d}"


def accuracy_text(line: Line) -> str:
    """Write how often a pair's chosen answer has the larger reward, or how often a classifier is right; empty where
    there is neither."""
    rate = next((line[name] for name in ("rewards/accuracies", "accuracy") if line.get(name) is not None), None)
    if rate is None:
        return ""
    pairs = "rewards/accuracies" in line or "mean_reward" in line
    return f"  {'reward ' if pairs else ''}accuracy {rate:.0%}"


def companion_text(line: Line) -> str:
    """Write what stands beside the loss: those of prediction layers, the nearest token first, and how often pairs are
    ranked or classes named correctly; empty where there is neither."""
    losses = [value for name, value in line.items() if PREDICTION_LOSS.fullmatch(name)]
    figures = "/".join("nan" if loss is None else f"{loss:.4f}" for loss in losses)
    ahead = f"  mtp {figures}" if losses else ""
    return ahead + accuracy_text(line)


def progress_figures(line: Line) -> str:
    """Write the few figures of a line that the progress shows."""
    if "reward" in line:
        loss = f"reward {line['reward']:.4f}"
    else:
        loss = "loss nan" if line["loss"] is None else f"loss {line['loss']:.4f}"
    speed = f"{line['tokens_per_second']:,.0f} tokens/s"
    return f"{loss}{companion_text(line)}  lr {line['learning_rate']:.2e}  {speed}"


def terminal_columns(stream: TextIO) -> int:
    """Return the width of a terminal; 0 if it is unknown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0


class Progress(Hook):
    """The bar, or the lines."""

    def __init__(self, stream: TextIO | None = None, every: float = PLAIN_SECONDS, unit: str = "label tokens") -> None:
        """`unit`: what an evaluation counts."""
        self.unit = unit
        self.stream = stream or sys.stderr
        self.every = every
        self.bar: tqdm | None = None
        self._first = 0
        self._began = self._last = 0.0
        self._said = 0.0
        """When the last line of any kind was written."""

    def on_start(self, run: Run) -> None:
        """Opens the bar where there is a terminal."""
        self._first = run.step
        self._began = self._said = time.monotonic()
        self._last = float("-inf")
        if distributed.global_rank() == 0 and self.stream.isatty():
            # A terminal may not give its size (`docker run -t` from a job, `script`); tqdm would then print nothing.
            size = {"dynamic_ncols": True} if terminal_columns(self.stream) else {"ncols": UNKNOWN_COLUMNS, "nrows": 20}
            self.bar = tqdm(total=run.total_steps, initial=run.step, bar_format=BAR, file=self.stream, **size)

    def on_evaluation_batch(self, run: Run, batches: int) -> None:
        """Says that an evaluation is under way."""
        if self.bar is not None:
            self.bar.set_description_str(f"evaluation, batch {batches:,}")
        self._say_if_silent(f"step {run.step}: evaluation, batch {batches:,}")

    def _say_if_silent(self, text: str) -> None:
        if distributed.global_rank() == 0 and time.monotonic() - self._said >= self.every:
            self._say(text)

    def _say(self, text: str) -> None:
        """A plain line, for the log file and where there is no bar."""
        self._said = time.monotonic()
        log.LOG_FILE.write(text)
        if self.bar is None:
            with contextlib.suppress(OSError):  # as in log: a closed pipe is no reason to end a run
                print(text, file=self.stream, flush=True)

    def on_step(self, run: Run, step: StepRecord) -> None:
        """Moves the bar, or says that steps are made where none of them was logged for a while."""
        if self.bar is not None:
            self.bar.update(1)
        self._say_if_silent(f"step {run.step}/{run.total_steps}")

    def on_log(self, run: Run, line: Line) -> None:
        """Shows the figures."""
        if self.bar is not None:
            self.bar.set_description_str(progress_figures(line), refresh=False)
        if distributed.global_rank() == 0 and (
            time.monotonic() - self._last >= self.every or line["step"] == run.total_steps
        ):
            self._last = time.monotonic()
            left = (self._last - self._began) / max(line["step"] - self._first, 1) * (run.total_steps - line["step"])
            self._say(f"step {line['step']}/{run.total_steps}  {progress_figures(line)}  ETA {duration_text(left)}")

    def on_evaluate(self, run: Run, line: Line) -> None:
        """Print a line about an evaluation."""
        if "prompts" in line:  # of a policy; without a reward where every function returned None
            reward = "none" if line.get("reward") is None else f"{line['reward']:.4f}"
            print_line(f"step {line['step']}: evaluation reward {reward} over {line['prompts']:,} prompts")
            return
        if not line["batches"]:  # of tasks alone, which have a line of their own
            return
        print_line(
            f"step {line['step']}: evaluation loss {line['loss']:.4f}{companion_text(line)} over "
            f"{line['label_tokens']:,} {self.unit}"
        )

    def close(self) -> None:
        """Leaves the bar as it is."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None
