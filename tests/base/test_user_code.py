"""Code of the user's that raises anything, ends the process or does not return becomes one error with its lines."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megaswift.base.user_code import CLOCK, UserCodeClock, convert_user_code_errors, import_user_file
from megaswift.errors import Problem, RewardError

THEIRS = """
import asyncio, os, re, sys, threading, time

class Odd(BaseException):
    pass

def sleeps():
    time.sleep(60)

def spins():
    while True:
        pass

def catches():
    while True:
        try:
            time.sleep(60)
        except BaseException:
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


def call(function: Any) -> Any:
    async def waited() -> Any:
        with convert_user_code_errors(said):
            return await function()

    if asyncio.iscoroutinefunction(function):
        return asyncio.run(waited())
    with convert_user_code_errors(said):
        return function()


PROGRAM = """
import asyncio, sys, threading
from pathlib import Path
from megaswift.errors import Problem, RewardError
from megaswift.base.user_code import CLOCK, convert_user_code_errors, import_user_file

names = import_user_file(Path(sys.argv[1]), "--reward_funcs theirs.py:f")
function = names[sys.argv[2]]
CLOCK.limit(0.3, "--ddp_timeout", lambda error: print(error.message(), flush=True))

async def waited(say):
    with convert_user_code_errors(say):
        await function()

def call():
    say = lambda trace: RewardError(Problem("--reward_funcs theirs.py:f", trace))
    if asyncio.iscoroutinefunction(function):
        asyncio.run(waited(say))
        return
    with convert_user_code_errors(say):
        function()

if sys.argv[3] == "thread":
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
else:
    call()
"""
"""Calls a function of a file in the main thread or another one."""


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "line", "thread"),
    [
        ("sleeps", "time.sleep(60)", "main"),
        ("sleeps", "time.sleep(60)", "thread"),
        ("spins", "line 1", "main"),
        ("catches", "time.sleep(60)", "main"),
        ("waits", "threading.Event().wait()", "main"),
        ("matches", "re.match(", "main"),
        ("awaits", "await asyncio.sleep(60)", "main"),
        ("blocks", "time.sleep(60)", "main"),
    ],
)
def test_code_that_does_not_return_ends_the_process(name: str, line: str, thread: str, tmp_path: Path) -> None:
    file = tmp_path / "theirs.py"
    file.write_text(THEIRS, encoding="utf-8")
    command = [sys.executable, "-c", PROGRAM, str(file), name, thread]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ)
    assert done.returncode == 2 and not done.stderr
    assert "has not returned after 0.3 s; a larger --ddp_timeout gives it more time" in done.stdout
    assert 'theirs.py", line ' in done.stdout and f"in {name}" in done.stdout and line in done.stdout


RENEWS = """
import time
from megaswift.errors import Problem, RewardError
from megaswift.base.user_code import CLOCK, convert_user_code_errors

CLOCK.limit(0.6, "--ddp_timeout", lambda error: print(error.message(), flush=True))
with convert_user_code_errors(lambda trace: RewardError(Problem("--environment a.py:A", trace))) as renew:
    for _ in range(4):
        time.sleep(0.3)
        renew(True)
    renew(False)
    time.sleep(1.5)
    print("renewed", flush=True)
    renew(True)
    time.sleep(60)
"""


@pytest.mark.process
def test_a_call_gets_its_time_again() -> None:
    """At each renewal, and any time while it waits for us; then it ends as any call does."""
    done = subprocess.run([sys.executable, "-c", RENEWS], capture_output=True, text=True, timeout=300, env=os.environ)
    assert done.returncode == 2 and done.stdout.startswith("renewed"), done.stderr
    assert "has not returned after 0.6 s" in done.stdout


def test_untimed_code_has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CLOCK, "seconds", 0.1)
    with convert_user_code_errors(said, timed=False):
        time.sleep(0.5)
    assert CLOCK.seconds == 0.1


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


def test_a_file_with_a_reward_and_an_environment_runs_once(tmp_path: Path) -> None:
    """Though both are looked up before the model is built and after it: they share what the file keeps."""
    from megaswift.rewards.user_function import load_user_reward_function
    from megaswift.trainers.rl.environment import load_environment_class

    file = tmp_path / "both.py"
    text = "made = []\n\ndef score(completions):\n    return made\n\ndef world():\n    made.append(len(made))\n"
    file.write_text(text, encoding="utf-8")
    for _ in range(2):
        load_environment_class(f"{file}:world")()
        reward = load_user_reward_function(f"{file}:score")
    assert reward.function([]) == [0, 1]
    file.write_text(text.replace("return made", "return 7"), encoding="utf-8")
    assert load_user_reward_function(f"{file}:score").function([]) == 7


def test_a_call_that_ends_while_its_time_is_renewed_stays_ended() -> None:
    """A thread renews it, another one finishes it: the clock would end the process for a call that has returned."""
    clock = UserCodeClock()
    number = clock.begin(lambda trace: RewardError(Problem("run", trace)), timed=False)

    class Finishes(dict[int, Any]):
        def get(self, key: int, default: Any = None) -> Any:
            return self.pop(key, default)

    clock._calls = Finishes(clock._calls)
    clock.renew(number, True)
    assert not clock._calls
