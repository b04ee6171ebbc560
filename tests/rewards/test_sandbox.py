"""Attempts to get out of the sandbox. Each is a program that prints the expected answer if it gets anywhere: none may,
nor leave a trace.

The attempts call the kernel by ctypes where Python's own modules would refuse first: the sandbox must hold against
native code.

Covers: megaswift/rewards/sandbox_child.py, megaswift/rewards/sandbox_server.py,
megaswift/rewards/seccomp_filter.py.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megaswift.errors import ConfigError, RewardError
from megaswift.rewards import code_reward, sandbox, sandbox_child, seccomp_filter
from megaswift.rewards.sandbox import ROOT, JobLimits, JobOutcome, Sandbox, self_test_sandbox
from megaswift.rewards.scoring import BuiltInRewardParameters
from tests.rewards.samples import judged

pytestmark = pytest.mark.wide

NUMBERS = {
    **seccomp_filter.FATAL,
    **seccomp_filter.ALLOWED,
    **seccomp_filter.WITHOUT_EXEC,
    "openat": (257, 56),
    "prlimit64": (302, 261),
}
COLUMN = 0 if os.uname().machine == "x86_64" else 1
C = "import ctypes, os, sys, time, signal\nlibc = ctypes.CDLL(None, use_errno=True)\ncall = libc.syscall\n"
ESCAPED = "escaped"
OPTIONS = BuiltInRewardParameters(max_completion_length=100, code_timeout=10.0, code_memory=256)


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    box = Sandbox("program", JobLimits(seconds=5.0, patience=6.0, memory=256))
    yield box
    box.close()


def attempt(box: Sandbox, program: str) -> JobOutcome:
    """What became of a program; its reward by the same outcome is 0, and the next program runs as ever."""
    outcome, good = box.run([{"source": program}, {"source": "print('fine')"}])
    assert (good.how, good.out) == ("ended", "fine\n")
    tests = [{"input": "", "output": ESCAPED}]
    assert not code_reward.CodeReward._right(code_reward.read_tests(tests)[0], outcome)
    return outcome


def syscall(name: str, *arguments: object) -> str:
    """A raw system call that reports success."""
    number = NUMBERS[name][COLUMN]
    assert number is not None
    return C + (
        f"r = call({', '.join(map(str, (number, *arguments)))})\nprint({ESCAPED!r} if r >= 0 else (r, "
        f"ctypes.get_errno()))"
    )


FORBIDDEN = {
    "fork": C + "os.fork()",
    "fork bomb": C + "while True:\n try: os.fork()\n except OSError: pass",
    "raw clone": syscall("clone", "17", 0, 0, 0, 0),
    "thread": "import _thread\n_thread.start_new_thread(print, ('escaped',))",
    "system": C + "os.system('echo escaped')",
    "subprocess": "import subprocess\nprint(subprocess.check_output(['echo', 'escaped'], text=True))",
    "exec": C + "os.execv('/bin/echo', ['echo', 'escaped'])",
    "spawn": C + "os.posix_spawn('/bin/echo', ['echo', 'escaped'], {})",
    "socket": "import socket\nsocket.socket()\nprint('escaped')",
    "raw socket": syscall("socket", 2, 1, 0),
    "unix": syscall("socket", 1, 1, 0),
    "netlink": syscall("socket", 16, 3, 0),
    "socketpair": "import socket\nsocket.socketpair()\nprint('escaped')",
    "connect": syscall("connect", 0, "b'x' * 16", 16),
    "kill the runner": C + "os.kill(os.getppid(), 9)\nprint('escaped')",
    "kill all": C + "os.kill(-1, 9)",
    "group": C + "os.killpg(0, 9)",
    "tgkill": syscall("tgkill", "os.getppid()", "os.getppid()", 9),
    "queue a signal": syscall("rt_sigqueueinfo", "os.getppid()", 9, 0),
    "pidfd": syscall("pidfd_open", "os.getppid()", 0),
    "ptrace": syscall("ptrace", 16, "os.getppid()", 0, 0),
    "read the runner's memory": syscall("process_vm_readv", "os.getppid()", 0, 0, 0, 0, 0),
    "io_uring": syscall("io_uring_setup", 8, 0),
    "bpf": syscall("bpf", 0, 0, 0),
    "perf": syscall("perf_event_open", 0, 0, -1, -1, 0),
    "keys": syscall("keyctl", 0, -1, 0),
    "namespaces": syscall("unshare", 0x10000000),
    "mount": syscall("mount", "b'/'", "b'/tmp'", 0, 4096, 0),
    "chroot": C + "os.chroot('/')",
    "filter again": syscall("prctl", 22, 1, 0, 0, 0),
    "seccomp": syscall("seccomp", 0, 0, 0),
    "be root": C + "os.setuid(0)\nprint('escaped')",
    "new session": C + "os.setsid()\nprint('escaped')",
    "memory file": C + "os.memfd_create('x')\nprint('escaped')",
    "shared memory": syscall("shmget", 0, 4096, 0o1600),
    "pipe": C + "os.pipe()\nprint('escaped')",
    "write a file": "open('x', 'w')",
    "append": "open('/etc/passwd', 'a')",
    "temporary file": "import tempfile\ntempfile.TemporaryFile()\nprint('escaped')",
    "folder": C + "os.mkdir('x')\nprint('escaped')",
    "symlink": C + "os.symlink('/etc/passwd', 'x')\nprint(open('x').read())",
    "hard link": C + "os.link('/etc/passwd', 'x')",
    "device": C + "os.mknod('x')",
    "output without end": C + "os.ftruncate(1, 1 << 40)",
    "x32": C + f"call({0x40000000 + 41}, 2, 1, 0)\nprint('escaped')",
    "x32 read": C + f"call({0x40000000}, 0, 0, 0)\nprint('escaped')",
}
"""What ends the program at once."""


@pytest.mark.parametrize("program", FORBIDDEN.values(), ids=FORBIDDEN)
def test_what_only_an_attack_does_ends_the_program(program: str, box: Sandbox) -> None:
    assert attempt(box, program).how == "forbidden"


REFUSED = {
    "read a file": "print(open('/etc/passwd').read(), 'escaped')",
    "environment": "print(open('/proc/self/environ').read())",
    "environment of the runner": C + "print(open(f'/proc/{os.getppid()}/environ').read())",
    "memory": "print(open('/proc/self/mem', 'rb').read(1))",
    "list processes": C + "print(os.listdir('/proc'))",
    "list": C + "print(os.listdir('.'))",
    "stat": C + "print(os.stat('/etc/passwd'))",
    "raw open": C
    + f"r = call({NUMBERS['openat'][COLUMN]}, -100, b'/etc/passwd', 0)\nprint('escaped' if r >= 0 else 0)\n1 / 0",
    "readlink": C + "print(os.readlink('/proc/self/exe'))",
    "library": C + "ctypes.CDLL('libresolv.so.2')",
    "memory to run": C + "import mmap\nm = mmap.mmap(-1, 4096, prot=7)\nprint('escaped')",
    "more than its memory": "print(bytearray(240 << 20)[0], 'escaped')",
    "memory bomb": "kept = []\nwhile True: kept.append(bytearray(1 << 20))",
    "words": "s = 'a'\nwhile True: s += s",
    "raise a limit": C
    + "from resource import *\nclass L(ctypes.Structure): _fields_ = [('a', ctypes.c_ulong), ('b', ctypes.c_ulong)]\n"
    f"r = call({NUMBERS['prlimit64'][COLUMN]}, 0, RLIMIT_AS, ctypes.byref(L(1 << 40, 1 << 40)), 0)\n"
    "print('escaped' if r == 0 else r)\n1 / 0",
    "a broken pointer": C + "ctypes.string_at(0)",
    "inherited descriptors": C
    + "print('escaped' if any(call(0, f, b'', 0) == 0 for f in range(4, 4096)) else '')\n1 / 0",
    "modules of the trainer": "import torch\nprint('escaped')",
}
"""What the kernel refuses, so that the program fails as it does for any error."""


@pytest.mark.parametrize("program", REFUSED.values(), ids=REFUSED)
def test_what_is_refused_fails(program: str, box: Sandbox) -> None:
    outcome = attempt(box, program)
    assert outcome.how == "failed" and ESCAPED not in outcome.out


ENDLESS = {
    "loop": "while True: pass",
    "sleep": "import time\ntime.sleep(100)",
    "wait": "import signal\nsignal.pause()",
    "deaf": C
    + (
        "for s in range(1, 65):\n try: signal.signal(s, signal.SIG_IGN)\n except (OSError, ValueError): pass\nwhile "
        "True: pass"
    ),
    "catches all": "while True:\n try:\n  while True: pass\n except BaseException: pass",
    "one long step": "print(7 ** 7 ** 9)",
    "in C": "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
}


def test_what_never_ends_is_ended(box: Sandbox) -> None:
    limits = JobLimits(seconds=1.0, patience=2.0, memory=256)
    outcomes = box.run([{"source": program} for program in ENDLESS.values()], limits)
    assert {name: o.how for name, o in zip(ENDLESS, outcomes, strict=True)} == dict.fromkeys(ENDLESS, "time")


def test_time_is_the_programs_own(box: Sandbox) -> None:
    """CPU time is limited; waiting is, by the clock, more generously."""
    works = "import time\nwhile time.process_time() < 3: pass"
    waits = "import time\ntime.sleep(1.1)"
    limits = JobLimits(seconds=1.0, patience=300.0)
    assert [o.how for o in box.run([{"source": waits}, {"source": works}], limits)] == ["ended", "time"]


@pytest.mark.parametrize(
    "program",
    [
        "while True: print('escaped' * 1000)",
        C + "while True: os.write(2, b'x' * 100000)",
        C + "while True: os.write(3, b'x' * 100000)",
        "print('escaped'); print('x' * (1 << 21))",
    ],
)
def test_output_without_end_is_no_answer(program: str, box: Sandbox) -> None:
    outcome = attempt(box, program)
    assert outcome.how in ("output", "time") and len(outcome.out) < 1 << 20


def test_nothing_of_the_trainer_is_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its environment nor the expected answers: programs search their memory for both."""
    monkeypatch.setenv("SECRET_TOKEN", "s3cret-in-the-environment")
    hunt = (
        "import ctypes, gc, os, sys\nlibc = ctypes.CDLL(None)\nlibc.getenv.restype = ctypes.c_char_p\n"
        "sought = '-'.join(['EXPECTED', '7193'])\n"
        "found = [s for o in gc.get_objects() for s in gc.get_referents(o) if isinstance(s, str) and sought in s and "
        "s is not sought]\n"
        "print(dict(os.environ), libc.getenv(b'SECRET_TOKEN'), found)\nprint(*sys.modules)"
    )
    tests = [{"input": "a", "output": "EXPECTED-7193"}, {"input": "", "output": "s3cret-in-the-environment"}]
    assert code_reward.code_reward(OPTIONS)([judged(f"```python\n{hunt}\n```", tests=tests)]) == [0.0]
    box = Sandbox("program", JobLimits())
    (outcome,) = box.run([{"source": hunt, "input": "a"}])
    assert outcome.how == "ended" and outcome.out.startswith("{} None []") and "torch" not in outcome.out
    box.close()


def test_what_lies_outside_stays_as_it_is(tmp_path: Path, box: Sandbox) -> None:
    tmp_path.chmod(0o777)
    kept = tmp_path / "kept"
    kept.write_text("as it was")
    kept.chmod(0o666)
    programs = [
        f"open({str(kept)!r}, 'w').write('x')",
        f"import os\nos.remove({str(kept)!r})",
        f"import os\nos.chmod({str(kept)!r}, 0)",
        f"import os\nos.truncate({str(kept)!r}, 0)",
        f"import os\nos.rename({str(kept)!r}, {str(tmp_path / 'moved')!r})",
        f"import shutil\nshutil.rmtree({str(tmp_path)!r})",
        f"import os\nos.utime({str(kept)!r})",
        f"print(open({str(kept)!r}).read())",
        f"import os\nos.mkdir({str(tmp_path / 'new')!r})",
        f"import os\nos.mkfifo({str(tmp_path / 'fifo')!r})",
    ]
    before = kept.stat()
    assert all(
        o.how in ("forbidden", "failed") and "as it was" not in o.out
        for o in box.run([{"source": p} for p in programs])
    )
    assert (
        [p.name for p in tmp_path.iterdir()] == ["kept"]
        and kept.read_text() == "as it was"
        and kept.stat().st_mode == before.st_mode
    )
    assert (
        kept.stat().st_mtime == before.st_mtime
        and box._folder is not None
        and list(Path(box._folder.name).iterdir()) == []
    )


def test_a_program_has_its_memory(box: Sandbox) -> None:
    assert box.run([{"source": "print(len(bytearray(160 << 20)))"}])[0].out == f"{160 << 20}\n"


def test_nobody_is_called(box: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        port = server.getsockname()[1]
        attempt(box, f"import socket\nsocket.create_connection(('127.0.0.1', {port})).send(b'x')\nprint('escaped')")
        with pytest.raises(TimeoutError):
            server.accept()


def test_no_process_is_left(box: Sandbox) -> None:
    box.run([{"source": program} for program in (FORBIDDEN["fork bomb"], FORBIDDEN["subprocess"], "print(1)")])
    assert box._process is not None and psutil.Process(box._process.pid).children(recursive=True) == []


@pytest.mark.process
def test_the_runner_and_its_programs_end_with_the_trainer() -> None:
    program = (
        "from megaswift.rewards.sandbox import *\nbox = Sandbox('program', JobLimits(seconds=60))\n"
        "box.run([{'source': '1'}])\nprint(box._process.pid, flush=True)\nbox.run([{'source': 'while True: pass'}])"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": ROOT}, stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout is not None
    runner = psutil.Process(int(trainer.stdout.readline()))
    deadline = time.monotonic() + 300
    while not (children := [c for c in runner.children() if c.cpu_times().user > 0.3]) and time.monotonic() < deadline:
        time.sleep(0.02)  # until the program itself runs
    trainer.kill()
    trainer.communicate()
    assert children and psutil.wait_procs([runner, *children], timeout=60)[1] == []


def test_a_runner_that_dies_is_told_and_started_anew() -> None:
    box = Sandbox("program", JobLimits(seconds=60.0))
    box.run([{"source": "1"}])
    assert box._process is not None
    runner = psutil.Process(box._process.pid)

    def kill_while_it_works() -> None:
        end = time.monotonic() + 300
        while not runner.children() and time.monotonic() < end:
            time.sleep(0.005)
        runner.kill()

    killer = threading.Thread(target=kill_while_it_works)
    killer.start()
    with pytest.raises(RewardError, match="its process ended while running 2 jobs"):
        box.run([{"source": "while True: pass"}, {"source": "1"}])
    assert box.run([{"source": "print(2)"}])[0].out == "2\n"
    box.close()


def test_a_call_that_is_interrupted_leaves_no_report_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Sandbox("program", JobLimits(seconds=5.0))
    read = sandbox._outcome

    def interrupted(*arguments: Any) -> JobOutcome:
        monkeypatch.setattr(sandbox, "_outcome", read)
        raise KeyboardInterrupt

    monkeypatch.setattr(sandbox, "_outcome", interrupted)
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt):
        box.run([{"source": f"print({i})"} for i in range(5)])
    assert [o.out for o in box.run([{"source": f"print('new {i}')"} for i in range(3)])] == [
        "new 0\n",
        "new 1\n",
        "new 2\n",
    ]
    box.close()
    assert len(os.listdir("/proc/self/fd")) <= open_files


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"from megaswift.rewards.sandbox import *\n{program}"]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": ROOT}, capture_output=True, text=True, timeout=300)


def test_without_a_sandbox_nothing_runs() -> None:
    """A process that calls itself 32 bit has no filter of ours; programs must not run there, and the check says so."""
    program = (
        "import ctypes; ctypes.CDLL(None).personality(8)\n"
        "box = Sandbox('program', JobLimits())\n"
        "try: box.run([{'source': 'print(1)'}])\nexcept RewardError as e: print(e)\n"
        "try: self_test_sandbox(box, '--reward_funcs code')\nexcept ConfigError as e: print(e)\n"
        "box.close(); box.locked = False; print(box.run([{'source': 'print(1)'}])[0].out)"
    )
    done = run_python(program)
    assert done.stdout.splitlines()[1].startswith(
        "  - the sandbox: could not be set up; no program was run: [Errno 0] no filter for i686"
    )
    assert "--reward_funcs code: generated programs need a sandbox, which is not available here" in done.stdout
    assert "--allow_unsafe_code true" in done.stdout and done.stdout.endswith("1\n\n")


def test_a_sandbox_that_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loose = Sandbox("program", JobLimits(seconds=2.0), locked=False)
    with pytest.raises(ConfigError, match=r"a trial program .* ended with 'ended', not"):
        self_test_sandbox(loose, "--reward_funcs code")
    loose.close()
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="it is darwin, not Linux"):
        self_test_sandbox(Sandbox("program", JobLimits()), "--reward_funcs code")


def test_no_part_of_it_needs_privileges() -> None:
    """Without any capability (24: PR_CAPBSET_DROP; the runner is started by exec, and has what is left)."""
    program = (
        "import ctypes; [ctypes.CDLL(None).prctl(24, number, 0, 0, 0) for number in range(64)]\n"
        "print(subprocess.run(['grep', 'CapEff', '/proc/self/status'], capture_output=True, "
        "text=True).stdout.split()[1])\n"
        "box = Sandbox('program', JobLimits()); self_test_sandbox(box, ''); print('holds')"
    )
    assert run_python(program).stdout == "0000000000000000\nholds\n"


def test_a_small_machine_and_many_ranks_share_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert sandbox.worker_count() == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert sandbox.worker_count() == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert sandbox.worker_count() == 1


def test_modules_are_found_without_parsing() -> None:
    source = (
        "import os.path as p, sys\nfrom collections import (deque,\n Counter)\n  import json; import re\nimport "
        "antigravity, numpy\n"
    )
    assert sandbox_child.imported_stdlib_modules(source) == [
        "os.path",
        "sys",
        "collections",
        "collections.deque",
        "json",
        "re",
    ]
