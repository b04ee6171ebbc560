"""Imported first by the server of a pool: its ranks have one H200, and Transformer Engine where a release is named."""

from __future__ import annotations

import os

import torch._dynamo  # noqa: F401 - looks for CUDA in torch's compiled part when it is imported

from megaswift.engine import jit_fuser, triton_support
from tests.fake_cuda import h200

# what is compiled for a GPU cannot run here
jit_fuser._chosen = False
triton_support.triton_launches = h200.always(True)
triton_support.runs_triton_kernels = h200.always(False)
h200.install()

if release := os.environ.get("MEGASWIFT_TE_RELEASE"):
    from tests.te import device, sources

    sources.DEVICE = "cuda"
    device.install(release)
