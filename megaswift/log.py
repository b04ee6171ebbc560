"""Messages of a run: only rank 0 prints, and the run's log file gets the same lines. No torch: the rank is taken from
the launcher's environment."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import TextIO

NO_KERNEL = ("bitsandbytes.backends.cpu.ops", "Failed to load CPU gemm_4bit_forward")
"""bitsandbytes 0.50 logs this wherever it is imported (peft does) on a CPU with AVX512-BF16 and no package `kernels`:
an optional faster kernel is missing. The logger, and how the message begins."""
NO_GPU = ("DeepSpeed", "Setting accelerator to CPU")
"""DeepSpeed 0.19 logs this on standard output where accelerate imports it on a machine without a GPU."""
NO_CUDA = ("torch.utils.cpp_extension", "No CUDA runtime is found")
"""torch logs this where Megatron-Core 0.19 imports it with a CUDA toolkit and without a GPU."""
NOTES_TO_CALLERS = (
    ("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED"),
    ("megatron.core.transformer.transformer_layer", "Rewrapping ModuleSpec with module"),
    ("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel: full_param_layout not provided"),
)
"""Megatron-Core 0.19 logs these to the developers of its callers wherever a model is built."""
_NOT_TOLD = (NO_KERNEL, NO_GPU, NO_CUDA, *NOTES_TO_CALLERS)


EARLY_LINES = 1000
"""At most so many lines are kept for a log file that is not open yet."""


class LogFile:
    """Keeps what rank 0 has printed, with the time of each line."""

    def __init__(self) -> None:
        self.file: TextIO | None = None
        self.early: list[str] = []

    def open(self, path: Path) -> None:
        """Lines go to the end of this file, those first that were printed before."""
        self.close()
        with contextlib.suppress(OSError):
            self.file = path.open("a", encoding="utf-8")
            self.file.write("".join(self.early))
            self.file.flush()
        self.early = []

    def write(self, text: str) -> None:
        """One message. A full disk is no reason to end a run."""
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = "".join(f"{when} {line}\n" for line in text.split("\n"))
        if self.file is None:
            self.early = [*self.early[1 - EARLY_LINES :], lines]
            return
        with contextlib.suppress(OSError):
            self.file.write(lines)
            self.file.flush()

    def close(self) -> None:
        """Nothing goes to the file any more."""
        if self.file is not None:
            with contextlib.suppress(OSError):
                self.file.close()
        self.file = None


LOG_FILE = LogFile()
"""The log file of the run that this process is part of."""


def is_main() -> bool:
    """True on the process that talks to the user (global rank 0, or a run without torchrun)."""
    return os.environ.get("RANK", "0") == "0"


def info(text: str) -> None:
    """A line for the user on standard error, from rank 0 only."""
    _say(f"megaswift: {text}")


def warn(text: str) -> None:
    """A line that should not be missed, from rank 0 only."""
    _say(f"megaswift: warning: {text}")


def print_result(text: str) -> None:
    """A line about what a command has made, on standard output, from rank 0 only: `> log` keeps it."""
    if is_main():
        LOG_FILE.write(f"megaswift: {text}")
        with contextlib.suppress(OSError):
            print(f"megaswift: {text}", flush=True)


def _say(line: str) -> None:
    if is_main():
        LOG_FILE.write(line)
        with contextlib.suppress(OSError):  # a closed terminal or a full disk behind it: no reason to end a run
            print(line, file=sys.stderr, flush=True)


def _other(record: logging.LogRecord) -> bool:
    """Whether a record is none of `_NOT_TOLD`."""
    return not str(record.msg).startswith(tuple(message for _, message in _NOT_TOLD))


def quiet_libraries() -> None:
    """Keeps the libraries' notes to developers (optional packages, renamed functions) off the user's screen; -W and
    PYTHONWARNINGS win."""
    for name, _ in _NOT_TOLD:
        logging.getLogger(name).addFilter(_other)
    if not sys.warnoptions:
        for module in ("megatron", "torch.distributed", "torch.nn.modules", "transformers", "peft"):
            warnings.filterwarnings("ignore", module=rf"{module}\..*", category=UserWarning)
            warnings.filterwarnings("ignore", module=rf"{module}\..*", category=FutureWarning)


def count_text(count: float, noun: str, form: str = ",") -> str:
    """`1 row`, `2,000 rows`, `1 process`: a number and what it counts; `form` is the number's format."""
    text = format(count, form)
    if text == "1":
        return f"{text} {noun}"
    ending = "es" if noun.endswith(("s", "tch")) else "s"
    return f"{text} {noun}{ending}"
