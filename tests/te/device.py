"""Transformer Engine on a CPU: its own Python over torch functions in place of its compiled kernels.

Owns the installation into a process. What is computed is in the files named `kernels_*.py`, how its Python is imported
in sources.py. Streams, graphs, speed and NCCL are not covered.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch
from torch import Tensor

from tests.te import registry, sources

KERNEL_FILES = (
    "attention",
    "context",
    "cross_entropy",
    "gather",
    "matmul",
    "misc",
    "norm",
    "optimizer",
    "overlap",
    "permutation",
    "fp8_weights",
    "quantize",
    "rope",
    "router",
    "softmax",
)
"""The files `kernels_*.py`."""


def install(release: str = sources.RELEASES[0]) -> None:
    """Makes `import transformer_engine` work in this process; a second call with the same release does nothing.

    Raises:
        FileNotFoundError: the wheel is not unpacked.
    """
    current = sys.modules.get("transformer_engine_torch")
    if current is not None:
        assert current.__release__ == release, f"this process has Transformer Engine {current.__release__} already"
        return
    folder = sources.wheel_folder(release)
    if not (folder / sources.PACKAGE).is_dir():
        raise FileNotFoundError(f"{folder}: no Transformer Engine {release} (bash scripts/setup_env.sh --dev)")
    assert "megatron.core.extensions.transformer_engine" not in sys.modules, "Megatron-Core looks for it when imported"
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # no shared libraries
    os.environ["NVTE_TORCH_COMPILE"] = "0"
    os.environ.setdefault("NVTE_MASKED_SOFTMAX_FUSION", "1")
    for name in KERNEL_FILES:
        importlib.import_module(f"tests.te.kernels_{name}")
    stand_in = registry.module(release)
    stand_in.__release__ = release  # type: ignore[attr-defined]
    sys.modules["transformer_engine_torch"] = stand_in
    sys.meta_path.insert(0, sources.Finder(folder))
    sys.path.append(str(folder))  # for the version, which importlib.metadata reads
    importlib.import_module("megaswift.engine.megatron")  # the table of CPU substitutions, before megatron.core
    for name in ("rotary_pos_embedding", "rope_utils"):
        owner = importlib.import_module(f"megatron.core.models.common.embeddings.{name}")
        assert hasattr(owner, "get_pos_emb_on_this_cp_rank")
        owner.get_pos_emb_on_this_cp_rank = own_angles
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from megaswift.engine.megatron.cpu.patches import _cpu_constant

    if sources.DEVICE == "cpu":
        # where tokens are sorted by Transformer Engine's kernels, their new order is made on the GPU
        build = MoEAlltoAllTokenDispatcher.__init__
        build.__code__ = _cpu_constant(build.__code__)


def own_angles(angles: Tensor, axis: int, group: Any) -> Tensor:
    """The angles of this context-parallel rank's two chunks: Megatron-Core's function, whose index is in pinned
    memory."""
    chunks = angles.chunk(2 * group.size(), axis)
    return torch.cat([chunks[group.rank()], chunks[2 * group.size() - 1 - group.rank()]], axis)
