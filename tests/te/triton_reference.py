"""Runs Transformer Engine's own Triton kernels of the permutation in Triton's interpreter, beside the stand-ins.

`python -m tests.te.triton_reference RELEASE` prints the largest difference of each function. It needs the package
triton, which the CPU build of torch comes without.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import sys
import types

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from tests.te import kernels_permutation as stand_ins
from tests.te import sources

TOKENS, EXPERTS, WIDTH = 9, 4, 8


class DeviceOnly(sources.Edits):
    """The device's name alone: triton stays triton."""

    def visit_Import(self, node: ast.Import) -> ast.Import:  # noqa: N802
        """As it is."""
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:  # noqa: N802
        """As it is."""
        return node


class Loader(importlib.machinery.SourceFileLoader):
    """Compiles a module with those edits."""

    def get_code(self, fullname: str) -> types.CodeType:
        """Of the edited tree."""
        path = self.get_filename(fullname)
        tree = ast.fix_missing_locations(DeviceOnly(fullname).visit(ast.parse(self.get_data(path))))
        return compile(tree, path, "exec", dont_inherit=True)


def kernels(release: str) -> types.ModuleType:
    """`transformer_engine.pytorch.triton.permutation` over the interpreter."""
    import triton

    root, autotune = sources.wheel_folder(release), triton.autotune
    # one configuration each: more would be timed, which needs a GPU's driver
    triton.autotune = lambda configs, **more: autotune(configs=configs[:1], **more)
    for package in ("transformer_engine", *(f"transformer_engine.{p}" for p in ("common", "common.triton"))):
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [str(root.joinpath(*package.split(".")))]
    path = root / "transformer_engine" / "pytorch" / "triton" / "permutation.py"
    loader = Loader("permutation", str(path))
    spec = importlib.util.spec_from_loader("permutation", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def difference(a: Tensor | None, b: Tensor | None) -> float:
    """The largest."""
    assert (a is None) == (b is None)
    return 0.0 if a is None or b is None else float((a.float() - b.float()).abs().max())


def compare(real: types.ModuleType) -> dict[str, float]:
    """Function -> the largest difference of its results."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(TOKENS, EXPERTS, generator=generator) > 0.5
    tokens, probs = torch.randn(TOKENS, WIDTH, generator=generator), torch.rand(TOKENS, EXPERTS) * mask
    n = int(mask.sum())
    offsets = torch.arange(EXPERTS, dtype=torch.int32) * 2
    found: dict[str, float] = {}
    for padding in (None, offsets):
        rows = n if padding is None else n + 2 * EXPERTS
        ids = [m.make_row_id_map(mask, TOKENS, EXPERTS) for m in (real, stand_ins)]
        valid = torch.arange(EXPERTS)[None] < ids[0][:, -1:]
        valid = torch.cat([valid, valid, torch.ones(TOKENS, 1, dtype=torch.bool)], 1)
        found["make_row_id_map"] = difference(ids[0] * valid, ids[1] * valid)
        sizes = (TOKENS, EXPERTS, rows, WIDTH, 0)
        moved = [m.permute_with_mask_map(tokens, ids[0], probs, None, padding, *sizes) for m in (real, stand_ins)]
        kind = "" if padding is None else ", padded"
        found["permute" + kind] = max(difference(a, b) for a, b in zip(*moved, strict=True))
        copies = torch.randn(rows, WIDTH, generator=generator)
        back = [
            m.unpermute_with_mask_map(copies, ids[0], probs, moved[0][2], padding, TOKENS, EXPERTS, WIDTH)
            for m in (real, stand_ins)
        ]
        routed = [(out, p * mask) for out, p in back]
        found["unpermute" + kind] = max(difference(a, b) for a, b in zip(*routed, strict=True))
        grads = [
            m.unpermute_with_mask_map_bwd_with_merging_probs(
                tokens, ids[0], copies, probs, padding, TOKENS, EXPERTS, rows, WIDTH
            )
            for m in (real, stand_ins)
        ]
        found["unpermute backward" + kind] = max(difference(a, b) for a, b in zip(*grads, strict=True))
    splits, order = torch.tensor([2, 3, 4]), torch.tensor([2, 0, 1])
    maps = [m.make_chunk_sort_map(splits, order, TOKENS, 3) for m in (real, stand_ins)]
    found["make_chunk_sort_map"] = difference(*maps)
    for forward in (True, False):
        pairs = [m.sort_chunks_by_map(tokens, maps[0], tokens[:, 0], TOKENS, WIDTH, forward) for m in (real, stand_ins)]
        found[f"sort_chunks_by_map, {forward}"] = max(difference(a, b) for a, b in zip(*pairs, strict=True))
    return found


if __name__ == "__main__":
    for name, value in compare(kernels(sys.argv[1])).items():
        print(f"{value:.2e} {name}")
