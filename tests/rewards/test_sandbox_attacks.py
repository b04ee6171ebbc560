"""Attacks on the verdict: programs that look for another completion's program, that forge how they ended, or that
change what reports their answer. None gets a reward, and none ends the run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from megaswift.rewards import code_reward
from megaswift.rewards.sandbox import JobLimits, Sandbox
from megaswift.rewards.scoring import BuiltInRewardParameters
from tests.rewards.samples import judged

pytestmark = pytest.mark.wide

OPTIONS = BuiltInRewardParameters(max_completion_length=100, code_timeout=10.0, code_memory=256)
SUM = [{"input": "1 2\n", "output": "3"}]
ADD = [{"fn_name": "add", "input": [1, 2], "output": 3}]
HONEST = "a, b = map(int, input().split())\nprint(a + b)\n"


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    box = Sandbox("program", JobLimits(seconds=10.0, patience=6.0, memory=256))
    yield box
    box.close()


def rewards(programs: list[str], tests: object) -> list[float]:
    return code_reward.code_reward(OPTIONS)([judged(f"```python\n{program}\n```", tests=tests) for program in programs])


SEARCH = """
import gc, sys
found = []
def look(thing, depth=0):
    if depth > 6 or id(thing) in seen: return
    seen[id(thing)] = thing
    if isinstance(thing, str) and 'map(int' in thing and 'SEA' + 'RCH' not in thing: found.append(thing)
    elif isinstance(thing, (list, tuple, set)): [look(one, depth + 1) for one in thing]
    elif isinstance(thing, dict): [look(one, depth + 1) for one in [*thing, *thing.values()]]
    elif hasattr(thing, '__dict__'): look(vars(thing), depth + 1)
seen = {}
frame = sys._getframe()
"""
THIEVES = {
    "frames": SEARCH + "while frame: look(dict(frame.f_locals)); look(dict(frame.f_globals)); frame = frame.f_back",
    "collector": SEARCH + "for thing in gc.get_objects(): look(thing); look(gc.get_referents(thing), 5)",
    "tracing": SEARCH
    + "def trace(frame, event, argument):\n    look(dict(frame.f_locals)); return trace\n"
    + "sys.settrace(trace)\nwhile frame: frame.f_trace = trace; look(dict(frame.f_locals)); frame = frame.f_back",
}
"""Each collects texts of programs that are not its own, and runs them. SEARCH marks its own."""


@pytest.mark.parametrize("hunt", THIEVES.values(), ids=THIEVES)
def test_a_program_finds_no_program_of_another_completion(hunt: str) -> None:
    """Where one does, it prints the right answer."""
    thief = f"{hunt}\nSEARCH = 0\nexec(found[0], {{}})"
    assert rewards([HONEST, thief, HONEST, thief], SUM) == [1.0, 0.0, 1.0, 0.0]


SCAN = r"""
import ctypes, os, re
libc = ctypes.CDLL(None, use_errno=True)
libc.write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
pattern = re.compile(rb'MARK OF ' + rb'ANOTHER (\d+)')
page, found, pages = 4096, set(), 0
places = {id(object()), id([0] * 100), id(bytes(300)), id('x' * 5000), id(re), id(ctypes), id(os.environ)}
places.add(id(bytes(100000)))
for place in places:
    for at in range(place - (4 << 20), place + (8 << 20), page):
        at -= at % page
        os.lseek(3, 0, 0)
        if libc.write(3, at, page) == page:
            pages += 1
            found.update(pattern.findall(ctypes.string_at(at, page)))
print(pages > 500, sorted(found))
"""


def test_a_program_s_raw_memory_holds_no_other_job(box: Sandbox) -> None:
    """Neither of this call nor of one before. The scan reads what is mapped, 12 MiB around each kind of object."""
    others = [
        {"source": f"print(0)  # MARK OF ANOTHER {n} " + "x" * 3000, "input": f"MARK OF ANOTHER {n}5"} for n in range(5)
    ]
    own = {"source": "# MARK OF ANOTHER 777\n" + SCAN, "input": ""}
    box.run(others)
    outcome = box.run([*others, own, *others])[5]
    assert (outcome.how, outcome.out) == ("ended", "True [b'777']\n"), outcome


ENDS = {
    "97": ("import os\nos._exit(97)", 97),
    "exit code of a text": ("import sys\nsys.exit('could not be locked')", 1),
    "a text that misleads": ("raise OSError(1, 'could not be locked, nothing was run')", 1),
    "our own error": (
        "import sys, traceback\njail = sys.modules['megaswift.rewards.sandbox_child']\n"
        "def refuse(*words): raise jail.SandboxSetupError(1, 'refused')\ntraceback.print_exc = refuse\n1 / 0",
        1,
    ),
    "the closed descriptors": (
        "import os\nfor file in range(4, 64):\n    try: os.write(file, b'refused: forged')\n    except OSError: pass\n"
        "    else: print('open', file)\nos._exit(97)",
        97,
    ),
    "descriptors again": (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
        "assert libc.dup2(1, 5) == libc.dup(1) == libc.fcntl(1, 0, 5) == -1\nos._exit(97)",
        97,
    ),
    "a module that ends what imports it": ("import unittest.__main__\nprint(3)", 1),
}


def test_no_program_can_say_that_it_was_not_locked(box: Sandbox) -> None:
    """Not by any exit code either: 256 of them."""
    outcomes = box.run([{"source": program} for program, _ in ENDS.values()])
    assert {name: (o.how, o.code, o.out) for name, o in zip(ENDS, outcomes, strict=True)} == {
        name: ("failed", code, "") for name, (_, code) in ENDS.items()
    }
    every = box.run([{"source": f"import os\nos._exit({code})"} for code in range(256)])
    assert [o.code for o in every] == [*range(256)] and {o.how for o in every[1:]} == {"failed"}
    assert rewards(["import os\nos._exit(97)", HONEST], SUM) == [0.0, 1.0]


PATCHES = {
    "equal to all": (
        "class Same:\n    def __eq__(self, other): return True\n    __hash__ = None\ndef add(a, b): return Same()"
    ),
    "a number equal to all": (
        "class Same(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Same(4)"
    ),
    "a text equal to all": (
        "class Same(str):\n    def __eq__(self, other): return True\ndef add(a, b): return Same('x')"
    ),
    "a list equal to all": (
        "class Same(list):\n    def __eq__(self, other): return True\ndef add(a, b): return Same([4])"
    ),
    "json": "import json\njson.dumps = lambda *a, **k: 'true'\ndef add(a, b): return None",
    "json that lies": (
        'import json\njson.dumps = lambda *a, **k: \'{"passed": true, "reward": 1.0}\'\ndef add(a, b): return 0'
    ),
    "write": "import os\nreal = os.write\nos.write = lambda file, data: real(file, b'true')\ndef add(a, b): return 0",
    "streams": "import sys, io\nsys.stdout = sys.stderr = io.StringIO('3')\ndef add(a, b): print(3)",
    "builtins": "import builtins\nbuiltins.all = builtins.isinstance = lambda *a: True\ndef add(a, b): return 0",
    "trainer's modules": (
        "import sys, types\nsame = types.ModuleType('x')\nsame.same = lambda a, b: True\n"
        "for name in [*sys.modules]:\n    if 'megaswift' in name: sys.modules[name] = same\ndef add(a, b): return 0"
    ),
    "our own frames": (
        "import sys\ndef add(a, b):\n    frame = sys._getframe()\n    while frame:\n"
        "        for name in ('value', 'code', 'expected', 'job'): frame.f_locals.get(name)\n"
        "        frame.f_locals['value'] = 3\n        frame = frame.f_back\n    return 0"
    ),
    "at exit": "import atexit, os\natexit.register(lambda: os.write(3, b'3'))\ndef add(a, b): return 0",
    "when deleted": (
        "import os\nclass Last:\n    def __del__(self, write=os.write): write(3, b'3')\nlast = Last()\n"
        "def add(a, b): return 0"
    ),
    "a signal": (
        "import os, signal, time\nsignal.signal(signal.SIGALRM, lambda *a: os.write(3, b'true'))\n"
        "def add(a, b):\n    signal.setitimer(signal.ITIMER_REAL, 0.01)\n    time.sleep(0.05)\n    return 0"
    ),
    "a trace": (
        "import sys, os\ndef trace(frame, event, argument):\n    os.write(3, b'1')\n    return trace\n"
        "sys.settrace(trace)\ndef add(a, b): return 0"
    ),
    "infinity": "def add(a, b): return float('inf')",
    "no number": "def add(a, b): return float('nan')",
    "a value that grows": "def add(a, b): return [[0]] * 10 ** 8",
    "two values": "import os\ndef add(a, b):\n    os.write(3, b'0\\n')\n    return 3",
}
"""Functions that do not add, beside attempts to pass for one that does."""


def test_nothing_in_a_program_s_process_makes_the_verdict() -> None:
    right = "def add(a, b): return a + b"
    found = rewards([right, *PATCHES.values(), right], ADD)
    assert dict(zip(PATCHES, found[1:-1], strict=True)) == dict.fromkeys(PATCHES, 0.0)
    assert found[0] == found[-1] == 1.0


def test_a_test_s_input_may_hold_any_text(box: Sandbox) -> None:
    """Data is scraped: half of an emoji in a row ended the run."""
    echo = "import sys\nprint(sys.stdin.read() == 'b \\ufffd\\ufffd\\ufffd\\n')"
    assert box.run([{"source": echo, "input": "b \ud83d\n"}, {"source": "print('\ud83d')"}])[0].out == "True\n"


def test_children_have_no_descriptor_but_their_own(box: Sandbox) -> None:
    """What the trainer has open is not there either."""
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    look = "import ctypes\nread = ctypes.CDLL(None).read\nprint([f for f in range(1024) if read(f, b'', 0) == 0])"
    assert box.run([{"source": look}] * 3)[2].out == "[0, 1, 2, 3]\n"
    os.close(reader), os.close(writer)


def test_the_runner_keeps_no_file_of_a_job(box: Sandbox) -> None:
    """It is what children are forked from."""
    assert box.run([{"source": "print(1)"}])[0].out == "1\n"
    assert box._process is not None
    folder = f"/proc/{box._process.pid}/fd"
    before = len(os.listdir(folder))
    box.run([{"source": "print(1)"}] * 5)
    assert len(os.listdir(folder)) == before
