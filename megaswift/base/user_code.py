"""Errors of the user's own Python files: importing one, and what its code raises, as messages with the user's lines.

Code of the user's that does not return is an error too, which ends the process: a clock watches each call
(`UserCodeClock`). So is code that ends the process itself: `os._exit` raises SystemExit inside of a call.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
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
OURS = str(Path(__file__).parents[1])
_exit_process = os._exit
LOOK_SECONDS = 0.2


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


_known: dict[Path, tuple[str, Mapping[str, Any]]] = {}
"""File -> the digest of its content, and the names that it defines."""


def names_of_user_file(path: Path, flag: str) -> Mapping[str, Any]:
    """Return the names that a file defines. The file runs once in a process, though a check asks for it
    before the model is built, and the part that uses it asks again. A file that has changed runs again."""
    place = path.resolve()
    digest = hashlib.sha256(place.read_bytes()).hexdigest() if place.is_file() else ""
    if place not in _known or _known[place][0] != digest:
        _known[place] = digest, import_user_file(path, flag)
    return _known[place][1]


def _module_name(path: Path) -> str:
    """A name of its own for each file: a second `score.py` does not take the first one's place."""
    first = f"megaswift_user_{path.stem}"
    names = itertools.chain([first], (f"{first}_{number}" for number in itertools.count(2)))
    return next(n for n in names if n not in sys.modules or _is_same_file(sys.modules[n], path))


def _is_same_file(module: Any, path: Path) -> bool:
    return Path(getattr(module, "__file__", None) or "").resolve() == path.resolve()


@dataclass
class _Call:
    """Code of the user's that runs now."""

    thread: int
    task: asyncio.Task[Any] | None
    ends: float
    """When its time is up."""
    say: Callable[[str], UserError]


def _print(error: UserError) -> None:
    print(error.message(), file=sys.stderr, flush=True)


class UserCodeClock:
    """Ends the process, with one message, when a call of the user's code takes too long.

    An exception would not do: the code may catch it, or wait in another thread.
    """

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
        self.seconds = seconds
        self.option = option
        self.end = end

    def begin(self, say: Callable[[str], UserError], timed: bool) -> int:
        """Register a call; returns its number."""
        number = next(self._numbers)
        process = os.getpid()
        if self._process != process:
            self._calls = {}
            self._process = process
            os._exit = _exit_of_user_code
        seconds = self.seconds if timed else float("inf")
        if seconds < float("inf"):
            self._start(process)
        self._calls[number] = _Call(threading.get_ident(), _current_task(), time.monotonic() + seconds, say)
        return number

    def _start(self, process: int) -> None:
        """Start the thread that looks at the calls, and a timer of CPU time: a regular expression keeps Python's lock,
        so that no thread runs, but it lets handlers of signals run."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGVTALRM, lambda *_: self._look())
            tick = min(self.seconds, 1.0)  # on a busy machine, seconds of CPU time take longer
            signal.setitimer(signal.ITIMER_VIRTUAL, tick, tick)
        if self._watched != process:
            self._watched = process
            threading.Thread(target=self._watch, name="user code clock", daemon=True).start()

    def renew(self, number: int, timed: bool) -> None:
        """Give a call its whole time again; not `timed`: it has any time until the next renewal, because it waits for
        us."""
        call = self._calls.get(number)
        if call is not None:
            # The entry stays as it is: another thread may have finished the call since.
            call.ends = time.monotonic() + self.seconds if timed else float("inf")

    def finish(self, number: int) -> None:
        """Forget a call that has ended."""
        self._calls.pop(number, None)
        if self._watched and not self._calls and threading.current_thread() is threading.main_thread():
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)

    def runs_here(self) -> bool:
        """Whether this thread is inside of the user's code."""
        here = threading.get_ident()
        return self._process == os.getpid() and any(call.thread == here for call in self._calls.copy().values())

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            self._look()

    def _look(self) -> None:
        now = time.monotonic()
        late = next((call for call in self._calls.copy().values() if now > call.ends), None)
        if late is not None:
            error = late.say(self._where(late))
            self.end(error)
            _exit_process(error.exit_code)

    def _where(self, call: _Call) -> str:
        """The user's lines that a call is at, and how long it has run."""
        waiting = _awaiting_frames(call.task)
        stack = [(f, f.f_lineno) for f in waiting]
        if not stack:
            stack = [*traceback.walk_stack(sys._current_frames().get(call.thread))][::-1]
        frames = [*traceback.StackSummary.extract(iter(stack))]
        while frames and frames[-1].filename == __file__:  # the handler of the signal
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
    """Returns the frames of the coroutines in which a suspended task waits."""
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
def convert_user_code_errors(say: Callable[[str], UserError], timed: bool = True) -> Iterator[Callable[[bool], None]]:
    """Raise what code of the user's raises as the error that `say` makes of its traceback; Ctrl-C passes.

    Code that does not return in the clock's time ends the process with such an error, unless `timed` is false. Yields
    the clock's `renew` for this call, which may be called from any thread.
    """
    number = CLOCK.begin(say, timed)
    try:
        yield functools.partial(CLOCK.renew, number)
    except (UserError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # the user's code may raise anything, and call sys.exit
        task = _current_task()
        if task is not None and task.cancelling():  # by our own loop, which ends
            raise
        raise say(user_traceback_text(error)) from error
    finally:
        CLOCK.finish(number)


def defined_at(thing: object) -> str:
    """Return `FILE:LINE` of a function, or of the `__call__` of an object; the empty string where there is none."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    thing = inspect.unwrap(thing) if callable(thing) else thing
    for found in (thing, getattr(type(thing), "__call__", None)):  # noqa: B004
        code = getattr(getattr(found, "__func__", found), "__code__", None)
        if code is not None:
            return f"{code.co_filename}:{code.co_firstlineno}"
    return ""


def user_traceback_text(error: BaseException) -> str:
    """The last frames outside of this package, indented, and what was raised."""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((OURS, "<frozen importlib"))
    ]
    return _shown(frames, traceback.format_exception_only(error))


def _shown(frames: list[traceback.FrameSummary], more: list[str] | None = None) -> str:
    lines = [*traceback.format_list(frames[-FRAMES:]), *(more or ())]
    return "\n".join("    " + line for entry in lines for line in entry.rstrip().splitlines())
