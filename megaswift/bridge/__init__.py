"""Hugging Face safetensors to Megatron shards and back, each rank reading only what it owns, with no conversion
step."""

from megaswift.bridge.hf_export import FolderOptions, export_hf
from megaswift.bridge.hf_source import HfSource, TensorMeta
from megaswift.bridge.hf_writer import HfWriter
from megaswift.bridge.quantized import open_hf_weights
from megaswift.bridge.weight_plan import PlanEntry, WeightPlan

__all__ = [
    "PlanEntry",
    "FolderOptions",
    "HfSource",
    "HfWriter",
    "TensorMeta",
    "WeightPlan",
    "export_hf",
    "open_hf_weights",
]
