"""Hugging Face safetensors to Megatron shards and back, each rank reading only what it owns, with no conversion
step."""

from megaswift.bridge.dequantized_hf_source import open_hf_weights
from megaswift.bridge.hf_export import HfExportOptions, write_hf_export
from megaswift.bridge.hf_megatron_weight_plan import PlanEntry, WeightPlan
from megaswift.bridge.hf_safetensors_source import HfSource, TensorMeta
from megaswift.bridge.hf_safetensors_writer import HfWriter

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
