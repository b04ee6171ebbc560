"""The child process of the sandbox: sets limits, drops privileges, closes files, installs the filter, then runs the
program.

Runs in the runner's children; imports nothing of ours but the filter. Nothing here trusts Python: what follows
`lock_syscalls` may run any native code.
"""

from __future__ import annotations

import builtins
import ctypes
import json
import os
import platform
import random
import re
import resource
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from megaswift.rewards import seccomp_filter

RESULT = 3
"""A child's descriptor for a function's result, as JSON."""
JOB = 4
"""A child's descriptor of its own job, as JSON; closed before the program runs."""
STATE = 5
"""A child's descriptor for LOCKED or REFUSED; closed before the program runs."""
LOCKED = b"locked"
"""A child writes this to STATE once it is locked."""
REFUSED = b"refused: "
"""A child writes this to STATE when the kernel refuses to lock it; it then runs nothing."""
NOBODY = 65534
_PDEATHSIG = 1
_NO_NEW_PRIVS = 38
_DUMPABLE = 4
_SECCOMP = 22
_FILTER = 2
_IMPORT = re.compile(
    r"(?:^|;|:)[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+\(?([\w \t,]*)|import[ \t]+([\w., \t]+))", re.MULTILINE
)
LEFT_OUT = {
    "__main__",
    "antigravity",
    "curses",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "readline",
    "site",
    "test",
    "this",
    "tkinter",
    "turtle",
    "turtledemo",
    "venv",
}
"""Names of modules of the standard library, and of parts of its packages, that do something when they are imported, or
that no program on a pipe needs."""
COMMON = (
    "_strptime",
    "bisect",
    "collections",
    "copy",
    "dataclasses",
    "datetime",
    "decimal",
    "fractions",
    "functools",
    "heapq",
    "io",
    "itertools",
    "linecache",
    "math",
    "operator",
    "re",
    "statistics",
    "string",
    "time",
    "typing",
)
"""Imported once, in the runner."""
_LIBC = ctypes.CDLL(None, use_errno=True)


class SandboxSetupError(OSError):
    """The kernel refused a part of the sandbox."""


def _prctl(option: int, value: int, more: Any = 0) -> None:
    if _LIBC.prctl(option, ctypes.c_ulong(value), more, ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        number = ctypes.get_errno()
        raise SandboxSetupError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def set_limits(cpu: int, memory: int, output: int) -> None:
    """Seconds of CPU time, MiB of address space, bytes of each output; no core files, no processes, few descriptors.

    At the end of its time a program gets SIGXCPU, which says so; one that does not heed it is killed a second later.
    """
    for what, most in (
        (resource.RLIMIT_CPU, cpu + 1),
        (resource.RLIMIT_AS, memory << 20),
        (resource.RLIMIT_FSIZE, output),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 64),
    ):
        ceiling = resource.getrlimit(what)[1]
        most = most if ceiling == resource.RLIM_INFINITY else min(most, ceiling)
        resource.setrlimit(what, (min(cpu, most) if what == resource.RLIMIT_CPU else most, most))


def end_with_runner(runner: int) -> None:
    """Ends with the runner; first to go when memory runs out."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # there may be no /proc
        file.write("1000")
    _prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != runner:
        os._exit(1)


def drop_privileges(runner: int) -> None:
    """Root becomes nobody where there is such a user; no environment. After imports: nobody may not read Python's own
    files."""
    if os.getuid() == 0:
        with suppress(OSError):  # a container with one user; the filter allows nothing that root could use
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
    end_with_runner(runner)  # a change of user undid it
    os.environ.clear()


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


def lock_syscalls(reading: bool = False) -> None:
    """From here on the process can only compute; SandboxSetupError where the kernel has no filters."""
    machine = platform.machine()
    if machine not in seccomp_filter.ARCHITECTURES or sys.byteorder != "little" or sys.maxsize < 2**32:
        raise SandboxSetupError(0, f"no filter for {machine}")
    code = seccomp_filter.filter_program(machine, reading)
    _prctl(_DUMPABLE, 0)
    _prctl(_NO_NEW_PRIVS, 1)
    _prctl(_SECCOMP, _FILTER, ctypes.byref(_Filter(len(code) // 8, code)))


def imported_stdlib_modules(source: str) -> list[str]:
    """Modules of the standard library that a program's text says it imports. A pattern finds them: nothing is parsed
    before the lock."""
    modules: dict[str, None] = {}
    for package, names, plain in _IMPORT.findall(source):
        candidates = (
            [package, *(f"{package}.{n.split()[0]}" for n in names.split(",") if n.split())]
            if package
            else plain.split(",")
        )
        modules |= dict.fromkeys(name.split()[0].strip(".") for name in candidates if name.split())
    return [n for n in modules if n.split(".")[0] in sys.stdlib_module_names and not LEFT_OUT & {*n.split(".")}]


def import_all(names: Iterable[str]) -> None:
    """Each that there is."""
    for name in names:
        with suppress(ImportError):  # a name in a module, or no such one: the program's own import will say so
            __import__(name)


def _streams() -> None:
    """sys.stdin and its like on the child's own descriptors."""
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115


def _run_at_once(thread: threading.Thread) -> None:
    """Run a thread's work in the calling thread. A subclass has a `run` of its own."""
    thread.run()


def _ignore_join(thread: threading.Thread, timeout: float | None = None) -> None:
    """Return at once: a thread has run to its end when `start` returns."""


def _ignore_stack_size(size: int = 0) -> int:
    return 0


def _ignore_limit(resource_number: int, limits: object) -> None:
    pass


def _prepare(source: str, name: str) -> types.ModuleType:
    """What a program expects to be there: its modules, `exit`, and what one does for a larger stack (a thread, a
    limit)."""
    import_all(imported_stdlib_modules(source))
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    threading.Thread.start = _run_at_once  # type: ignore[method-assign,assignment]
    threading.Thread.join = _ignore_join  # type: ignore[method-assign,assignment]
    threading.stack_size = _ignore_stack_size  # type: ignore[assignment]
    resource.setrlimit = _ignore_limit  # type: ignore[assignment]
    random.seed(0)
    module = types.ModuleType(name)
    sys.modules[name] = module
    return module


def _result(module: types.ModuleType, name: str, arguments: list[Any]) -> Any:
    """What a function of the program's returns, or a method of its class Solution."""
    holder = vars(module)
    if name not in holder and "Solution" in holder:
        return getattr(holder["Solution"](), name)(*arguments)
    return holder[name](*arguments)


def run_program(job: Mapping[str, Any], locked: Callable[[], None]) -> int:
    """Runs a program, or calls a function of it; the exit code. `locked` locks, after everything that needs files."""
    module = _prepare(job["source"], "program" if job.get("function") else "__main__")
    _streams()
    locked()
    code = 0
    try:
        exec(compile(job["source"], "program", "exec"), vars(module))
        if job.get("function"):
            value = _result(module, job["function"], job["arguments"])
            os.write(RESULT, json.dumps(value, default=lambda v: {"set": sorted(v, key=repr)}).encode())
    except SystemExit as end:
        code = 0 if end.code in (None, 0) else 1
        code = 1 if job.get("function") else code
    except BaseException:  # the judged program may raise anything, KeyboardInterrupt too
        traceback.print_exc()
        code = 1
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        code = code or 1
    return code
