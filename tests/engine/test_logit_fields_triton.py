"""The Triton kernels of the head in Triton's interpreter against plain torch on the same logits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.triton_programs import NEED_TRITON, printed

pytestmark = NEED_TRITON
PROGRAM = "tests.engine.run_triton_kernels"


def test_kernels_give_what_torch_gives() -> None:
    """Every field, gradient, dtype, soft cap, padding, labels of other shards, several blocks a row."""
    cases = printed(PROGRAM, TRITON_INTERPRET="1")
    assert len(cases) == 36
    assert all(float(value) < float(limit) for _, value, limit in cases), cases


@pytest.mark.slow
def test_kernels_compile(tmp_path: Path) -> None:
    """For compute capability 9.0, by Triton's compiler, which needs no GPU: the interpreter takes more than it does."""
    cases = printed(PROGRAM, "compile", TRITON_CACHE_DIR=str(tmp_path))
    assert len(cases) == 12 and all(int(size) > 1000 for _, _, size in cases), cases
