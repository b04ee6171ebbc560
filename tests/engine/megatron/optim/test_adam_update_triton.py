"""The Triton kernel of the precision-aware update in Triton's interpreter against plain torch."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

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


@pytest.mark.slow
def test_the_kernel_compiles(tmp_path: Path) -> None:
    """For compute capability 9.0; where addresses are multiples of 16 bytes, only the four numbers of a step are loaded
    one by one."""
    cases = printed(PROGRAM, "compile", TRITON_CACHE_DIR=str(tmp_path))
    assert len(cases) == 10 and all(int(size) > 1000 for *_, size, _ in cases), cases
    assert {int(single) for _, aligned, _, single in cases if aligned == "4"} == {4}, cases


def test_several_elements_at_once_only_where_all_addresses_allow_it(megatron: ModuleType) -> None:
    """A tensor that begins within 16 bytes, which each tensor may, and a size that is no multiple of 16."""
    from megaswift.engine.megatron.optim import adam_update_triton as kernels
    from tests.engine.megatron.precision_aware_parameters import KINDS, drawn

    for kind in KINDS:
        p = drawn(kind, 32)
        assert kernels.operands(p)[1] & kernels.ALIGNED
        assert not kernels.operands(drawn(kind, 24))[1] & kernels.ALIGNED
        for name, tensor in p._asdict().items():
            if tensor is not None:
                shifted = torch.zeros(33, dtype=tensor.dtype)[1:]
                assert not kernels.operands(p._replace(**{name: shifted}))[1] & kernels.ALIGNED, (kind.name, name)


def test_addresses_are_sent_once_and_the_latest_kept(megatron: ModuleType) -> None:
    """Of each kind of parameters one table; another where a tensor lies elsewhere, in place of the old one."""
    from megaswift.engine.megatron.optim import adam_update_triton as kernels

    rows = [(16, 32, 48, 64, 80, 5000), (96, 112, 128, 144, 160, 40_000)]
    tables: dict[Any, Any] = {}
    first = kernels._table_of(rows, tables, "a", torch.device("cpu"))
    assert kernels._table_of(list(rows), tables, "a", torch.device("cpu")) is first
    assert first[0].tolist() == [list(row) for row in rows] and first[1].tolist() == [[0, 0], [1, 0], [1, 1]]
    moved = kernels._table_of([rows[0], (16, *rows[1][1:])], tables, "a", torch.device("cpu"))
    assert moved is not first and moved[0][1, 0] == 16
    kernels._table_of(rows, tables, "b", torch.device("cpu"))
    assert {key: table[1] is moved for key, table in tables.items()} == {"a": True, "b": False}
