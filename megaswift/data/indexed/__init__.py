"""Megatron-LM's indexed data: PREFIX.bin and PREFIX.idx."""
