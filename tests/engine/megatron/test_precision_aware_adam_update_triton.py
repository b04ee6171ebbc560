"""The Triton kernel of the precision-aware update in Triton's interpreter against plain torch."""

from __future__ import annotations

from pathlib import Path

from tests.engine.triton_programs import NEED_TRITON, printed

pytestmark = NEED_TRITON
PROGRAM = "tests.engine.megatron.run_precision_aware_adam_kernel"


def test_the_kernel_gives_what_torch_gives() -> None:
    """Bit for bit: every dtype of gradients, weights, main weights and moments, several parameters and chunks a launch.
    Two of four steps are skipped, which leave everything as it was."""
    cases = printed(PROGRAM, TRITON_INTERPRET="1")
    assert len(cases) == 24 * 5
    for kind, name, other, steps in cases:
        changed = "2" if name != "gradient" and not (name == "main" and ",none," in kind) else "0"
        assert (other, steps) == ("0", changed), (kind, name, other, steps)


def test_the_kernel_compiles(tmp_path: Path) -> None:
    """For compute capability 9.0; where addresses are multiples of 16 bytes, only the four numbers of a step are loaded
    one by one."""
    cases = printed(PROGRAM, "compile", TRITON_CACHE_DIR=str(tmp_path))
    assert len(cases) == 10 and all(int(size) > 1000 for *_, size, _ in cases), cases
    assert {int(single) for _, aligned, _, single in cases if aligned == "4"} == {4}, cases
