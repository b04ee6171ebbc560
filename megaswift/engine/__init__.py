"""Engines: what trains a model. `protocol` is the seam; `megatron` the native engine on Megatron-Core."""
