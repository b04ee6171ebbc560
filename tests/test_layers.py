"""Dependencies point down: which module may import which, lazy imports included (layers: docs/architecture.md)."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from megaswift.config.sections import SECTIONS
from megaswift.evaluation.options import evaluation as evaluation_options
from megaswift.inference.options import commands as inference_options
from megaswift.rejection.options import sampling as sampling_options
from tests.sources import ROOT, Source, called_name, sources

LAYERS = {
    "base": 0,
    "errors": 0,
    "log": 0,
    "version": 0,
    "device_copy": 0,
    "config": 1,
    "options": 0,
    "node_download": 1,
    "error_exit": 2,
    "parallel": 2,
    "losses": 2,
    "data": 2,
    "models": 2,
    "families": 2,
    "folders": 2,
    "memory": 3,
    "planner": 3,
    "launchers": 2,
    "compat": 1,
    "clusters": 2,
    "diagnosis": 2,
    "bridge": 3,
    "distributed": 3,
    "engine": 4,
    "evaluation": 5,
    "inference": 5,
    "serve": 5,
    "rollout": 5,
    "rejection": 5,
    "rewards": 5,
    "trainers": 6,
    "run": 7,
    "bisection": 8,
    "board": 8,
    "cli": 8,
    "commands": 8,
    "simulator": 8,
}
OF_OPTIONS = 1
"""The layer of every module and package named `options`, which stand next to the code that reads them: declarations,
tables of names, checks, values that follow. They import no torch."""
TOP = 8
"""Entry points: every other module directly in megaswift/."""
OWNERS = {
    "megatron": "megaswift.engine.megatron",
    "transformer_engine": "megaswift.engine.megatron",
    "deepspeed": "megaswift.engine.torch",
    "gradio": "megaswift.board",
    "lm_eval": "megaswift.evaluation",
}
NO_TORCH = (
    "base",
    "errors",
    "log",
    "version",
    "node_download",
    "config",
    "options",
    "parallel",
    "launchers",
    "compat",
    "clusters",
    "memory",
    "planner",
    "diagnosis",
)
AGENT = (
    "megaswift.launchers.torchrun_agent",
    "megaswift.launchers.node_end",
    "megaswift.launchers.node_wait",
    "megaswift.launchers.first_node",
    "megaswift.diagnosis.import_probe",
)
"""A program of its own around torchrun, its word to the other nodes and its wait for them, and the program that imports
torch for `megaswift doctor`; all import torch when they are called."""


def is_of_options(module: str) -> bool:
    """Whether a module belongs to the options of a part."""
    return "options" in module.split(".")[2:]


def layer(module: str) -> int:
    """0 is the lowest."""
    parts = module.split(".")
    if is_of_options(module):
        return OF_OPTIONS
    return LAYERS.get(parts[1], TOP) if len(parts) > 1 else TOP


def imported(source: Source, known: set[str]) -> set[str]:
    """Dotted names of what a file imports; `from package import module` is that module when we have it."""
    found: set[str] = set()
    for node in source.nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = (
                    source.module.split(".") if source.path.name == "__init__.py" else source.module.split(".")[:-1]
                )
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.add(full if full in known or base == "megatron" else base)
        elif isinstance(node, ast.Call) and called_name(node) in ("import_module", "__import__"):
            found.update(str(a.value) for a in node.args[:1] if isinstance(a, ast.Constant))
    return found - {source.module}


@cache
def graph(root: Path = ROOT) -> dict[str, set[str]]:
    """Module -> what it imports, of the package: lazily and for types too."""
    files = list(sources(root, ("megaswift",)))
    known = {f.module for f in files}
    return {f.module: imported(f, known) for f in files}


def upward(edges: dict[str, set[str]]) -> list[str]:
    """Imports of our own modules in a higher layer."""
    return [
        f"{a} -> {b}"
        for a, found in edges.items()
        for b in sorted(found)
        if b.split(".")[0] == "megaswift" and layer(b) > layer(a)
    ]


def foreign(edges: dict[str, set[str]]) -> list[str]:
    """Imports that belong to one folder only, made elsewhere; torch where there must be none."""
    wrong = []
    for module, found in edges.items():
        for name in sorted(found):
            top = name.split(".")[0]
            owner = OWNERS.get(top)
            if owner and not (module == owner or module.startswith(owner + ".")):
                wrong.append(f"{module} -> {name}")
            if (
                top == "torch"
                and len(module.split(".")) > 1
                and (module.split(".")[1] in NO_TORCH or is_of_options(module))
                and module not in AGENT
            ):
                wrong.append(f"{module} -> {name}")
    return wrong


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import one another (Tarjan's strongly connected components of more than one)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = low[module] = len(number)
        stack.append(module)
        for other in sorted(edges[module] & edges.keys()):
            if other not in number:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], number[other])
        if low[module] == number[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in edges:
        if module not in number:
            visit(module)
    return found


@pytest.mark.wide
def test_imports_point_down() -> None:
    assert upward(graph()) == []


def test_no_cycles() -> None:
    """Imports never form a cycle, those for types included."""
    assert cycles(graph()) == []


def test_megatron_deepspeed_and_torch_stay_where_they_belong() -> None:
    edges = graph()
    assert foreign(edges) == []
    assert AGENT[0] in edges and not any(AGENT[0] in found for found in edges.values())


def test_the_core_sees_other_toolkits_through_one_door() -> None:
    """Only the top of `config/` hands the door to the loader; the other commands hand in a door of their own."""
    found = {
        (module, name)
        for module, names in graph().items()
        for name in names
        if name.startswith("megaswift.compat") and module.startswith("megaswift.config")
    }
    assert found == {("megaswift.config.swift_config", "megaswift.compat")}


def test_declarations_import_the_definition_of_options_and_one_another_only() -> None:
    """Rules between parts see the whole tree; what declares options does not."""
    edges = graph()
    below = ("megaswift.options", "megaswift.errors", "megaswift.base")
    wrong = [
        (module, name)
        for module in {name.rpartition(".")[0] for name in declared_parts()}
        for name in edges[module]
        if name.split(".")[0] == "megaswift" and not (name.startswith(below) or is_of_options(name))
    ]
    assert wrong == []


def test_the_loader_imports_no_part() -> None:
    """It is handed the table of options."""
    found = [name for module, names in graph().items() if module.startswith("megaswift.options") for name in names]
    allowed = ("megaswift.options", "megaswift.errors", "megaswift.base", "megaswift.log", "megaswift.version")
    assert [name for name in found if name.split(".")[0] == "megaswift" and not name.startswith(allowed)] == []


def declared_parts() -> set[str]:
    """Classes that declare options."""
    return {
        f"{source.module}.{node.name}"
        for source in sources(ROOT, ("megaswift",))
        for node in source.nodes
        if isinstance(node, ast.ClassDef) and any(_declares_option(line) for line in node.body)
    }


def test_every_part_is_in_a_tree() -> None:
    """A class with options that no command has would be dead text."""
    commands = [
        found
        for module in (inference_options, evaluation_options, sampling_options)
        for name, found in vars(module).items()
        if name.endswith("Options")
    ]
    tree = {*SECTIONS.values(), *commands}
    registered = {f"{cls.__module__}.{cls.__name__}" for part in tree for cls in part.__mro__}
    declared = declared_parts()
    assert len(declared) > 20 and declared <= registered
    assert all(is_of_options(name) for name in declared)


def _declares_option(line: ast.stmt) -> bool:
    return (
        isinstance(line, ast.AnnAssign)
        and isinstance(line.value, ast.Call)
        and ast.unparse(line.value.func) == "option"
    )


def test_every_package_has_a_layer() -> None:
    packages = {p.name for p in (ROOT / "megaswift").iterdir() if p.is_dir() and list(p.glob("*.py"))}
    assert packages <= LAYERS.keys()


@pytest.mark.parametrize(
    ("rule", "file", "text"),
    [
        (upward, "megaswift/data/x.py", "def f() -> None:\n    from megaswift.trainers import loop\n"),
        (upward, "megaswift/config/x.py", "from ..engine import protocol\n"),
        (upward, "megaswift/bridge/x.py", "import importlib\nimportlib.import_module('megaswift.engine.protocol')\n"),
        (foreign, "megaswift/bridge/x.py", "def f() -> None:\n    from megatron.core import parallel_state\n"),
        (foreign, "megaswift/trainers/x.py", "import transformer_engine.pytorch as te\n"),
        (foreign, "megaswift/engine/megatron/x.py", "import deepspeed\n"),
        (foreign, "megaswift/parallel/x.py", "def f() -> None:\n    import torch\n"),
        (cycles, "megaswift/config/x.py", "from megaswift.config import y\n"),
    ],
)
def test_a_forbidden_import_is_found(rule, file: str, text: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    (tmp_path / "megaswift" / "config").mkdir(exist_ok=True)
    (tmp_path / "megaswift" / "config" / "y.py").write_text("def f():\n    import megaswift.config.x\n")
    assert len(rule(graph(tmp_path))) == 1


@pytest.mark.process
@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["sft", "--help"],
        ["config", "--schema"],
        ["convert", "--help"],
        ["infer", "--help"],
        ["deploy", "--help"],
    ],
)
def test_help_needs_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys, runpy; from megaswift.cli import main\n"
        f"main({arguments!r})\n"
        "heavy = {'torch', 'transformers', 'megatron', 'numpy', 'datasets', 'pyarrow'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
