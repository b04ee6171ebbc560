"""Imports Transformer Engine's own Python from an unpacked wheel, with the few edits that let it run on a CPU.

Owns the list of edits, each made to the syntax tree of a module when it is imported, and the import hook. Which
functions replace compiled code is in registry.py. Wheels are unpacked by `scripts/setup_env.sh --dev`.
"""

from __future__ import annotations

import ast
import functools
import importlib.abc
import importlib.machinery
import os
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.te.registry import REPLACED, WRAPPED

DEVICE = "cpu"
"""What new tensors of Transformer Engine are made on; tests/fake_cuda leaves "cuda"."""
RELEASES = ("2.12.0", "2.20.2")
"""The release that fits the torch of a GPU machine at hand, and the newest."""
PACKAGE = "transformer_engine"
STAND_INS = ("triton", "onnx", "onnxscript")
EDITS = {
    "device": 'the string "cuda" names the device of a new tensor: "cpu"',
    "is_cuda": "x.is_cuda asks whether a kernel can take a tensor: x.is_cpu",
    "torch.cuda": "torch.cuda is asked for the GPU and its streams: tests/te/cuda.py",
    "float16": "fused attention takes [torch.float16, torch.bfloat16] only: float32 beside them",
    "imports": "triton and onnx are imported for kernels and exports: tests/te/standin_modules.py",
}
"""Edit -> why."""
FLOAT32_ATTENTION = (f"{PACKAGE}.pytorch.attention.dot_product_attention.backends",)


def wheel_folder(release: str) -> Path:
    """Where a release's wheel is unpacked: `$MEGASWIFT_TE_WHEELS/RELEASE`, or `te/RELEASE` of the environment."""
    root = os.environ.get("MEGASWIFT_TE_WHEELS") or Path(sys.prefix) / "te"
    return Path(root) / release


class Edits(ast.NodeTransformer):
    """The edits of one module, counted."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.made: Counter[str] = Counter()

    def _replace(self, kind: str, old: ast.AST, new: Any) -> Any:
        self.made[kind] += 1
        return ast.copy_location(new, old)

    def visit_Constant(self, node: ast.Constant) -> Any:  # noqa: N802
        """Devices by name."""
        return self._replace("device", node, ast.Constant(DEVICE)) if node.value == "cuda" else node

    def visit_Attribute(self, node: ast.Attribute) -> Any:  # noqa: N802
        """`is_cuda`, `torch.cuda`."""
        self.generic_visit(node)
        of_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
        if node.attr == "is_cuda":
            return self._replace("is_cuda", node, ast.Attribute(node.value, "is_cpu", node.ctx))
        if of_torch and node.attr == "cuda":
            return self._replace("torch.cuda", node, ast.Name("_test_device_cuda", ast.Load()))
        return node

    def visit_List(self, node: ast.List) -> Any:  # noqa: N802
        """`[torch.float16, torch.bfloat16]`."""
        self.generic_visit(node)
        if self.name not in FLOAT32_ATTENTION or not any(ast.unparse(e) == "torch.float16" for e in node.elts):
            return node
        wide = ast.Attribute(ast.Name("torch", ast.Load()), "float32", ast.Load())
        return self._replace("float16", node, ast.List([*node.elts, wide], node.ctx))

    def visit_Import(self, node: ast.Import) -> Any:  # noqa: N802
        """`import triton.language as tl`."""
        if node.names[0].name.partition(".")[0] not in STAND_INS:
            return node
        alias = node.names[0].asname or node.names[0].name.partition(".")[0]
        return self._replace("imports", node, ast.Import([ast.alias("tests.te.standin_modules", alias)]))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:  # noqa: N802
        """`from triton.language import core`."""
        if node.level or (node.module or "").partition(".")[0] not in STAND_INS:
            return node
        return self._replace("imports", node, ast.ImportFrom("tests.te.standin_modules", node.names, 0))


def edited(source: bytes, name: str, path: str = "<source>") -> tuple[ast.Module, Counter[str]]:
    """A module's syntax tree after the edits, and how many there were of each kind."""
    edits = Edits(name)
    tree = ast.fix_missing_locations(edits.visit(ast.parse(source, path)))
    return tree, edits.made


class EditingLoader(importlib.machinery.SourceFileLoader):
    """Compiles the edited tree, and puts functions of registry.py in place before another module can import them."""

    def get_code(self, fullname: str) -> Any:
        """Without bytecode files: these would hold the module as it is."""
        path = self.get_filename(fullname)
        tree, _ = edited(self.get_data(path), fullname, path)
        return compile(tree, path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        """Runs the module, then replaces."""
        from tests.te.cuda import Cuda

        vars(module)["_test_device_cuda"] = Cuda()
        super().exec_module(module)
        for symbol, function in REPLACED.items():
            owner, _, name = symbol.partition(":")
            if owner == module.__name__ and hasattr(module, name):
                setattr(module, name, function)
        for symbol, function in WRAPPED.items():
            owner, _, name = symbol.partition(":")
            if owner == module.__name__ and hasattr(module, name):
                setattr(module, name, functools.partial(function, getattr(module, name)))


class Finder(importlib.abc.MetaPathFinder):
    """Finds `transformer_engine` in one folder, whatever else is installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> Any:
        """The package's modules with our loader; None for all others."""
        if fullname.partition(".")[0] != PACKAGE:
            return None
        places = [str(self.folder)] if fullname == PACKAGE else path
        spec = importlib.machinery.PathFinder.find_spec(fullname, places)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = EditingLoader(spec.loader.name, spec.loader.path)
        return spec
