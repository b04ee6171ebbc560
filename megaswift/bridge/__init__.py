"""Hugging Face safetensors to Megatron shards and back, each rank reading only what it owns, with no conversion
step."""

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
