"""Hugging Face safetensors to Megatron shards and back, each rank reading only what it owns, with no conversion
step.

The names below are looked up on first use: the options of adapters stand in this package and load no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaswift.bridge.hf.dequantized import open_hf_weights
    from megaswift.bridge.hf.export import HfExportOptions, write_hf_export
    from megaswift.bridge.hf.source import HfSource, TensorMeta
    from megaswift.bridge.hf.writer import HfWriter
    from megaswift.bridge.plan import PlanEntry, WeightPlan

__all__ = [
    "PlanEntry",
    "HfExportOptions",
    "HfSource",
    "HfWriter",
    "TensorMeta",
    "WeightPlan",
    "write_hf_export",
    "open_hf_weights",
]

_WHERE = {
    "open_hf_weights": "hf.dequantized",
    "HfExportOptions": "hf.export",
    "write_hf_export": "hf.export",
    "HfSource": "hf.source",
    "TensorMeta": "hf.source",
    "HfWriter": "hf.writer",
    "PlanEntry": "plan",
    "WeightPlan": "plan",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"megaswift.bridge.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'megaswift.bridge' has no attribute {name!r}")
