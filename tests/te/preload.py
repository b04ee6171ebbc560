"""Imported first by the server of `te_pool`: its ranks have Transformer Engine on the test device.

`MEGASWIFT_TE_RELEASE` names the release.
"""

from __future__ import annotations

import os

import torch

from tests.te import device, sources
from tests.te.cuda import CAPABILITY

device.install(os.environ.get("MEGASWIFT_TE_RELEASE", sources.RELEASES[0]))

from megaswift.engine.megatron import engine  # noqa: E402
from megaswift.engine.megatron.layers import implementation  # noqa: E402

engine.transformer_engine_unusable_reason = implementation.transformer_engine_unusable_reason = lambda: ""
torch.cuda.get_device_capability = lambda *_: CAPABILITY  # type: ignore[assignment]
