"""Errors of the user's own Python files: importing one, and what its code raises, as messages with the user's lines.

Code of the user's that does not return, or that ends the process, is an error too: a clock watches each call
(`UserCodeClock`), and `os._exit` raises SystemExit inside of one.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import itertools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from megaswift.errors import ConfigError, Problem, UserError

if TYPE_CHECKING:
    import asyncio

FRAMES = 3
LIBRARIES = ("site-packages", "dist-packages", str(Path(threading.__file__).parent) + os.sep)
"""In the file names of code that is not the user's own."""
OURS = str(Path(__file__).parent)
_exit_process = os._exit
WAKE = getattr(signal, "SIGRTMIN", signal.SIGALRM)
"""Interrupts what the main thread waits for."""
STDERR = 2
LOOK_SECONDS = 0.2
GRACE_SECONDS = 5.0
"""Between the exception in the main thread and the end of the process, for code that catches everything."""


def import_user_file(path: Path, flag: str) -> Mapping[str, Any]:
    """The names that a file defines. It can import modules of its own folder; installed packages have priority."""
    spec = importlib.util.spec_from_file_location(_module_name(path), path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses of the file look themselves up
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    with convert_user_code_errors(lambda trace: ConfigError(Problem(flag, f"importing the file failed\n{trace}"))):
        spec.loader.exec_module(module)
    return vars(module)


def _module_name(path: Path) -> str:
    """A name of its own for each file: a second `score.py` does not take the first one's place."""
    first = f"megaswift_user_{path.stem}"
    names = itertools.chain([first], (f"{first}_{number}" for number in itertools.count(2)))
    return next(n for n in names if n not in sys.modules or _is_same_file(sys.modules[n], path))


def _is_same_file(module: Any, path: Path) -> bool:
    return Path(getattr(module, "__file__", None) or "").resolve() == path.resolve()


class _TimeIsUp(BaseException):
    """Raised in the main thread, inside of the user's code: no `except Exception` there catches it."""


@dataclass
class _Call:
    """Code of the user's that runs now."""

    thread: int
    task: asyncio.Task[Any] | None
    ends: float
    """When its time is up."""
    say: Callable[[str], UserError]
    error: UserError | None = None
    """Once the time is up."""


def _print(error: UserError) -> None:
    print(error.message(), file=sys.stderr, flush=True)


class UserCodeClock:
    """Ends calls of the user's code that take too long: by an exception in the main thread or in the task that waits;
    elsewhere, and where the exception has no effect, by the end of the process."""

    def __init__(self) -> None:
        self.seconds = float("inf")
        self.option = ""
        self.end: Callable[[UserError], object] = _print
        """Prints the error before the process ends."""
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count()
        self._process = self._watched = 0
        """The process of the calls, and the one whose thread watches them: a forked child has none."""

    def limit(self, seconds: float, option: str, end: Callable[[UserError], object]) -> None:
        """Sets the time of a call from now on; `option` is what a message names."""
        self.seconds, self.option, self.end = seconds, option, end

    def begin(self, say: Callable[[str], UserError], timed: bool) -> int:
        """A call begins; returns its number."""
        number = next(self._numbers)
        process = os.getpid()
        if self._process != process:
            self._calls, self._process = {}, process
            os._exit = _exit_of_user_code
        seconds = self.seconds if timed else float("inf")
        if seconds < float("inf"):
            self._start(process)
        self._calls[number] = _Call(threading.get_ident(), _current_task(), time.monotonic() + seconds, say)
        return number

    def _start(self, process: int) -> None:
        """Starts what ends a call: the thread; for code that keeps Python's lock and looks at signals (a regular
        expression), a timer of the CPU time; for code that does not, the fault handler, which prints the stack."""
        if threading.current_thread() is threading.main_thread():
            if not self._interrupts():
                signal.signal(WAKE, self._interrupt)
                signal.signal(signal.SIGVTALRM, self._interrupt)
            signal.setitimer(signal.ITIMER_VIRTUAL, self.seconds, LOOK_SECONDS)
        faulthandler.dump_traceback_later(self.seconds + 2 * GRACE_SECONDS, exit=True, file=STDERR)
        if self._watched != process:
            self._watched = process
            threading.Thread(target=self._watch, name="user code clock", daemon=True).start()

    def _interrupts(self) -> bool:
        return signal.getsignal(WAKE) == self._interrupt

    def finish(self, number: int) -> UserError | None:
        """The call has ended; returns the error where its time was up."""
        call = self._calls.pop(number, None)
        if call is None:
            return None
        if self._watched and not self._calls:
            faulthandler.cancel_dump_traceback_later()
            if threading.current_thread() is threading.main_thread():
                signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        return call.error

    def runs_here(self) -> bool:
        """Whether this thread is inside of the user's code."""
        here = threading.get_ident()
        return self._process == os.getpid() and any(call.thread == here for call in self._calls.copy().values())

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """The handler of both signals."""
        here = threading.get_ident()
        now = time.monotonic()
        for call in self._calls.copy().values():
            if call.thread == here and now > call.ends:
                call.error = call.error or call.say(self._where([], frame))
                raise _TimeIsUp

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            now = time.monotonic()
            for call in self._calls.copy().values():
                if call.error is None and now > call.ends:
                    self._stop(call)
                elif call.error is not None and now > call.ends + GRACE_SECONDS:
                    self._end_process(call.error)

    def _stop(self, call: _Call) -> None:
        waiting = _awaiting_frames(call.task)
        call.error = call.say(self._where(waiting, sys._current_frames().get(call.thread)))
        if waiting and call.task is not None:
            call.task.get_loop().call_soon_threadsafe(call.task.cancel)
        elif call.thread == threading.main_thread().ident and self._interrupts():
            signal.pthread_kill(call.thread, WAKE)
        else:
            self._end_process(call.error)

    def _end_process(self, error: UserError) -> NoReturn:
        self.end(error)
        _exit_process(error.exit_code)

    def _where(self, waiting: list[FrameType], frame: FrameType | None) -> str:
        """The user's lines that the call is at, and how long it has run."""
        stack = [(f, f.f_lineno) for f in waiting] or [*traceback.walk_stack(frame)][::-1]
        frames = [*traceback.StackSummary.extract(iter(stack))]
        while frames and frames[-1].filename == __file__:  # the handler of a signal that came before this one
            frames.pop()
        inner = max((i + 1 for i, f in enumerate(frames) if f.filename.startswith(OURS)), default=0)
        theirs = [f for f in frames[inner:] if not any(part in f.filename for part in LIBRARIES)]
        text = _shown(theirs or frames[inner:])
        return f"{text}\n    has not returned after {self.seconds:g} s; a larger {self.option} gives it more time"


CLOCK = UserCodeClock()


def _current_task() -> asyncio.Task[Any] | None:
    module = sys.modules.get("asyncio")  # importing it takes longer than printing a help page
    try:
        return None if module is None else module.current_task()
    except RuntimeError:  # no loop runs in this thread
        return None


def _awaiting_frames(task: asyncio.Task[Any] | None) -> list[FrameType]:
    """Where a task waits that does not run now: the frames of its coroutines."""
    frames: list[FrameType] = []
    coroutine: Any = None if task is None else task.get_coro()
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        frames.append(frame)
        coroutine = coroutine.cr_await
    running = bool(frames) and coroutine is None
    return [] if running else frames


def _exit_of_user_code(status: int) -> NoReturn:
    """Stands for `os._exit`: a run does not end in the middle as if it had finished. Forked children do end."""
    if CLOCK.runs_here():
        raise SystemExit(status)
    _exit_process(status)


@contextmanager
def convert_user_code_errors(say: Callable[[str], UserError], timed: bool = True) -> Iterator[None]:
    """What code of the user's raises as the error that `say` makes of its traceback; Ctrl-C passes.

    Code that does not return in the clock's time is such an error too, unless `timed` is false.
    """
    number = CLOCK.begin(say, timed)
    try:
        yield
    except (UserError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # the user's code may raise anything, and call sys.exit
        late = CLOCK.finish(number)
        task = _current_task()
        if late is not None:
            raise late from None
        if task is not None and task.cancelling():  # by our own loop, which ends
            raise
        raise say(user_traceback_text(error)) from error
    finally:
        CLOCK.finish(number)


def user_traceback_text(error: BaseException) -> str:
    """The last frames outside of this package, indented, and what was raised."""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((OURS, "<frozen importlib"))
    ]
    return _shown(frames, traceback.format_exception_only(error))


def _shown(frames: list[traceback.FrameSummary], more: list[str] | None = None) -> str:
    lines = [*traceback.format_list(frames[-FRAMES:]), *(more or ())]
    return "\n".join("    " + line for entry in lines for line in entry.rstrip().splitlines())
