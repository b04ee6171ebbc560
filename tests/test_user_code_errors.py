"""Code of the user's that raises anything, ends the process or does not return becomes one error with its lines."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megaswift.errors import Problem, RewardError
from megaswift.user_code_errors import CLOCK, convert_user_code_errors, import_user_file

THEIRS = """
import asyncio, os, re, sys, threading, time

class Odd(BaseException):
    pass

def sleeps():
    time.sleep(60)

def spins():
    while True:
        pass

def goes_on():
    while True:
        try:
            time.sleep(60)
        except Exception:
            pass

def waits():
    threading.Event().wait()

def matches():
    re.match("(a|a)*$", "a" * 60 + "b")

async def awaits():
    await asyncio.sleep(60)

async def blocks():
    time.sleep(60)

def exits():
    os._exit(0)

def odd():
    raise Odd("this")

async def cancels():
    raise asyncio.CancelledError

def forks():
    child = os.fork()
    if not child:
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


def said(trace: str) -> RewardError:
    return RewardError(Problem("--reward_funcs theirs.py:f", f"failed\n{trace}"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    file = tmp_path_factory.mktemp("theirs") / "theirs.py"
    file.write_text(THEIRS, encoding="utf-8")
    import_user_file(file, "--reward_funcs theirs.py:f")
    return sys.modules["megaswift_user_theirs"]


@pytest.fixture
def short() -> Iterator[None]:
    before = CLOCK.seconds, CLOCK.option, CLOCK.end
    CLOCK.limit(0.3, "--ddp_timeout", print)
    yield
    CLOCK.limit(*before)


def call(function: Any) -> Any:
    async def waited() -> Any:
        with convert_user_code_errors(said):
            return await function()

    if asyncio.iscoroutinefunction(function):
        return asyncio.run(waited())
    with convert_user_code_errors(said):
        return function()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("sleeps", "time.sleep(60)"),
        ("spins", "line 1"),
        ("goes_on", "time.sleep(60)"),
        ("waits", "threading.Event().wait()"),
        ("matches", "re.match("),
        ("awaits", "await asyncio.sleep(60)"),
        ("blocks", "time.sleep(60)"),
    ],
)
def test_code_that_does_not_return(name: str, line: str, theirs: ModuleType, short: None) -> None:
    told = "has not returned after 0.3 s; a larger --ddp_timeout gives it more time"
    with pytest.raises(RewardError, match=told) as error:
        call(getattr(theirs, name))
    assert 'theirs.py", line ' in str(error.value) and f"in {name}" in str(error.value) and line in str(error.value)


def test_untimed_code_has_time(theirs: ModuleType, short: None) -> None:
    with convert_user_code_errors(said, timed=False):
        time.sleep(0.6)
    assert CLOCK.seconds == 0.3


@pytest.mark.parametrize(
    ("name", "told"), [("exits", "SystemExit: 0"), ("odd", "Odd: this"), ("cancels", "CancelledError")]
)
def test_code_that_ends_the_process_or_raises_what_is_no_exception(name: str, told: str, theirs: ModuleType) -> None:
    with pytest.raises(RewardError, match=told) as error:
        call(getattr(theirs, name))
    assert f"in {name}" in str(error.value)


def test_a_forked_child_of_their_code_ends(theirs: ModuleType) -> None:
    assert call(theirs.forks) == 7


def test_ctrl_c_passes() -> None:
    with pytest.raises(KeyboardInterrupt), convert_user_code_errors(said):
        raise KeyboardInterrupt


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "score.py").write_text(f"def f():\n    return {folder!r}\n", encoding="utf-8")
    files = [import_user_file(tmp_path / folder / "score.py", "--reward_funcs x") for folder in ("a", "b")]
    modules = [sys.modules[names["f"].__module__] for names in files]
    assert [module.f() for module in modules] == ["a", "b"]


@pytest.mark.process
@pytest.mark.parametrize(
    "words", ["import threading; t = threading.Thread(target=f); t.start(); t.join()", "f()"], ids=["thread", "main"]
)
def test_where_no_exception_helps_the_process_ends(words: str) -> None:
    """A thread's call, and code that catches everything."""
    program = f"""
import time
from megaswift import user_code_errors
from megaswift.errors import Problem, RewardError
from megaswift.user_code_errors import CLOCK, convert_user_code_errors

user_code_errors.GRACE_SECONDS = 0.5
def f():
    with convert_user_code_errors(lambda trace: RewardError(Problem("here", trace))):
        while True:
            try:
                time.sleep(60)
            except BaseException:
                pass
CLOCK.limit(0.3, "--ddp_timeout", lambda error: print(error.message(), flush=True))
{words}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.returncode == 2 and "has not returned after 0.3 s" in done.stdout and not done.stderr
