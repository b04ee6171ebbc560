"""Megatron-Core's compiled pointwise functions: on by default with CUDA, off by `--jit_fuser false` and on a CPU.

Covers: megaswift/engine/jit_fuser.py.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from megaswift.engine import jit_fuser

PROGRAM = """
import sys, torch
torch.cuda.is_available = lambda: sys.argv[1] == "cuda"
from megaswift.engine.jit_fuser import choose_jit_fuser
if sys.argv[2] != "unset":
    choose_jit_fuser({"true": True, "false": False}[sys.argv[2]])
from megaswift.engine.megatron.cpu import patches as megatron_cpu_patch_table
from megatron.core.fusions.fused_bias_swiglu import jit_fuser
print(jit_fuser is torch.compile)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "option", "compiled"), [("cuda", "unset", True), ("cuda", "false", False), ("cpu", "unset", False)]
)
def test_what_megatron_core_binds(device: str, option: str, compiled: bool) -> None:
    """In a fresh process, as it binds the decorator at import."""
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, device, option]
    assert subprocess.check_output(command, text=True).split()[-1] == str(compiled)


def test_the_option_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit_fuser, "_chosen", None)
    for value, results in ((None, (True, False)), (False, (False, False)), (True, (True, True))):
        jit_fuser.choose_jit_fuser(value)
        assert (jit_fuser.fuses_pointwise_functions(True), jit_fuser.fuses_pointwise_functions(False)) == results
