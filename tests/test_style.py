"""The house rules that a machine can hold: names, forbidden calls, docstrings, annotations; ruff and mypy."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.sources import FOLDERS, ROOT, Source, called_name, sources

NOT_NAMES = ("utils", "util", "helpers", "helper", "common", "misc", "tools")
IMPORT_NAMES = {
    "yaml",
    "megatron",
    "transformer_engine",
    "apex",
    "deepspeed",
    "vllm",
    "sglang",
    "ray",
    "PIL",
    "jinja2",
    "google",
}
FORBIDDEN_IMPORTS = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
PICKLE_ALLOWED = {
    "megaswift/bridge/checkpoint/chunk_files.py": "writes the format's own tables",
    "megaswift/bridge/checkpoint/metadata.py": "the format's own tables, by an Unpickler for their classes",
    "megaswift/bridge/checkpoint/tensor_file.py": (
        "the description of one tensor in that format, by an Unpickler that calls nothing"
    ),
    "megaswift/bridge/foreign/legacy_pickle.py": (
        "Megatron-LM's legacy checkpoints, for convert alone, by an Unpickler that imports no name"
    ),
}
CATCH_ALL_ALLOWED = {
    "megaswift/data/tokenizer.py": (
        "the tokenizers library raises Exception itself; its subclasses of others' making go on"
    ),
    "megaswift/launchers/ray_cluster.py": "Ray raises Exception itself; its subclasses go on",
    "scripts/fuzz.py": "whatever is not our own error is a finding",
    "megaswift/rewards/sandbox_child.py": "a judged program may raise anything; it ends its own process",
    "megaswift/trainers/hooks/trackers.py": "a tracker's library may raise anything in its thread; the run goes on",
    "megaswift/trainers/rl/waves.py": "whatever a call raises in its thread is raised again in the leader's",
    "megaswift/base/user_code.py": (
        "a user's reward function may raise anything; it is told with the user's own traceback"
    ),
}
RUNS_PROGRAMS = {"megaswift/rewards/sandbox_child.py": "judged programs, in a process that can only compute"}
FORBIDDEN_CALLS = {"eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"}


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def dependencies(extras: Iterable[str]) -> set[str]:
    """Import names of what pyproject.toml asks for, with these extras."""
    rows = [*PROJECT["dependencies"], *(row for name in extras for row in PROJECT["optional-dependencies"][name])]
    return {re.split(r"[\[<>=!~ ;]", row)[0].lower().replace("-", "_") for row in rows}


BASE = dependencies(["dev"]) | {"megatron"}
"""What is there wherever the tests run."""
TAKEN = dependencies(PROJECT["optional-dependencies"]) | IMPORT_NAMES | set(sys.stdlib_module_names) - {"__main__"}


def functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in source.nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def names(source: Source) -> Iterator[str]:
    """No grab bags, and nothing that hides a library when its folder comes first on the path."""
    if source.path.stem in NOT_NAMES:
        yield f"{source.path}: say what the module owns"
    own = [source.path.stem] if source.path.stem != "__init__" else []
    if source.folder == "megaswift":
        own += source.path.parts[1:2][: len(source.path.parts) - 2]
    yield from (f"{source.path}: {name} is the name of a library" for name in own if name.lower() in TAKEN)


def handlers(source: Source) -> Iterator[str]:
    """What also catches our own mistakes: `except:`, `except Exception`, `suppress(Exception)`. Where it must be, its
    line says why."""
    for node in source.nodes:
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            caught = node.args
        else:
            continue
        if any(c is None or getattr(c, "id", "") in ("Exception", "BaseException") for c in caught):
            if source.folder != "tests" and source.path.as_posix() not in CATCH_ALL_ALLOWED:
                yield source.at(node, "catches everything")
            elif "  # " not in source.text.splitlines()[node.lineno - 1]:
                yield source.at(node, "catches everything and does not say why in this line")


JUDGED_KEYWORDS = ("allow_pickle", "shell", "weights_only")


def calls(source: Source) -> Iterator[str]:
    """What runs text or data as code."""
    for node in source.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            allowed = source.path.as_posix() in PICKLE_ALLOWED or source.folder == "tests"
            yield from (
                source.at(node, f"imports {n}") for n in found if n.split(".")[0] in FORBIDDEN_IMPORTS and not allowed
            )
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        keywords = {k.arg: ast.unparse(k.value) for k in node.keywords if k.arg in JUDGED_KEYWORDS}
        judged = name == "exec" and source.path.as_posix() in RUNS_PROGRAMS
        if (name in FORBIDDEN_CALLS and not judged) or keywords.get("allow_pickle") == "True":
            yield source.at(node, f"calls {name}")
        if keywords.get("shell") == "True":
            yield source.at(node, "starts a shell")
        if name == "torch.load" and source.folder != "tests" and keywords.get("weights_only") != "True":
            yield source.at(node, "torch.load without weights_only=True")


def skips(source: Source) -> Iterator[str]:
    """A test that is left out where a library that the tests install is missing: it is not missing, so the test would
    hide."""
    for node in source.nodes:
        if isinstance(node, ast.Call) and called_name(node) == "importorskip":
            name = ast.unparse(node.args[0]).strip("'")
            if name.split(".")[0] in BASE:
                yield source.at(node, f"importorskip of {name}, which is always there")


def claims(function: ast.AST, names: set[str]) -> bool:
    """Whether something in it can fail a test: an assertion, an expected error, a call of one of `names`, `check` or
    `assert_...`."""
    called = {called_name(n) for n in ast.walk(function) if isinstance(n, ast.Call)}
    return (
        any(isinstance(n, ast.Assert) for n in ast.walk(function))
        or bool(called & {"raises", "fail", "check", *names})
        or any(name.startswith("assert_") for name in called)
    )


def empty_tests(source: Source) -> Iterator[str]:
    """A test that asserts nothing, by itself or by a function of its file."""
    if source.path.name.startswith("test_"):
        helpers = {f.name for f in functions(source) if claims(f, set())}
        tests = (f for f in functions(source) if f.name.startswith("test_"))
        yield from (source.at(f, f"{f.name} asserts nothing") for f in tests if not claims(f, helpers))


def documents(source: Source) -> Iterator[str]:
    """A module says what it owns."""
    if source.text.strip() and not ast.get_docstring(source.tree):
        yield f"{source.path} has no docstring"


def annotations(source: Source) -> Iterator[str]:
    """Types on every signature outside the tests."""
    if source.folder == "tests":
        return
    for f in functions(source):
        every = [
            *f.args.posonlyargs,
            *f.args.args,
            *f.args.kwonlyargs,
            *(a for a in (f.args.vararg, f.args.kwarg) if a),
        ]
        bare = [a.arg for a in every if a.annotation is None and a.arg not in ("self", "cls")]
        if bare or f.returns is None:
            yield source.at(f, f"{f.name}: no type for {', '.join(bare) or 'what it returns'}")


Rule = Callable[[Source], Iterator[str]]
RULES: tuple[Rule, ...] = (names, handlers, calls, skips, empty_tests, documents, annotations)


@pytest.mark.wide
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.__name__)
def test_the_repository_follows(rule: Rule) -> None:
    found = [line for source in sources() for line in rule(source)]
    assert not found, "\n" + "\n".join(found)


BAD: list[tuple[Rule, str, str]] = [
    (names, "megaswift/data/utils.py", ""),
    (names, "megaswift/logging.py", ""),
    (names, "megaswift/datasets/a.py", ""),
    (names, "scripts/tokenizers.py", ""),
    (handlers, "scripts/a.py", "try:\n    x = 1\nexcept (ValueError, Exception):\n    pass\n"),
    (handlers, "scripts/a.py", "try:\n    x = 1\nexcept:\n    pass\n"),
    (handlers, "scripts/a.py", "with contextlib.suppress(Exception):\n    x = 1\n"),
    (handlers, "tests/test_a.py", "try:\n    x = 1\nexcept Exception:\n    pass\n"),
    (handlers, "megaswift/rewards/sandbox_child.py", "try:\n    x = 1\nexcept BaseException:\n    pass\n"),
    (calls, "scripts/a.py", "eval('1')\n"),
    (calls, "scripts/a.py", "from pickle import loads\n"),
    (calls, "scripts/a.py", "subprocess.run('ls', shell=True)\n"),
    (calls, "scripts/a.py", "torch.load(file)\n"),
    (skips, "tests/test_a.py", "pytest.importorskip('torch')\n"),
    (skips, "tests/test_a.py", "pytest.importorskip('megatron.core').x\n"),
    (empty_tests, "tests/test_a.py", "def helper(x):\n    return x\n\n\ndef test_a():\n    helper(1)\n"),
    (documents, "scripts/a.py", "x = 1\n"),
    (annotations, "scripts/a.py", "def f(a) -> None: ...\n"),
    (annotations, "scripts/a.py", "def f(a: int): ...\n"),
]


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_a_breach_is_found(rule: Rule, path: str, text: str) -> None:
    assert len(list(rule(Source(Path(path), text)))) == 1


def test_what_is_allowed_is_not_found() -> None:
    body = "    try:\n        torch.load(a, weights_only=True)\n    except OSError:\n        pass\n"
    text = f'"""A."""\n\n\ndef f(self: object, *, a: int) -> None:\n{body}'
    source = Source(Path("megaswift/engine/torch/fine.py"), text)
    assert [line for rule in RULES for line in rule(source)] == []


@pytest.mark.process
@pytest.mark.parametrize(
    "command",
    [["ruff", "check", *FOLDERS], ["ruff", "format", "--check", *FOLDERS], ["mypy"]],
    ids=lambda c: "-".join(c[:2]),
)
def test_checker_is_content(command: list[str]) -> None:
    command = [*command[:1], *(c for c in command[1:] if c not in FOLDERS or (ROOT / c).is_dir())]
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
