"""Sharded checkpoints (torch_dist): files, tables and tensors, read by Hugging Face names."""
