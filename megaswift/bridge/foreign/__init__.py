"""Checkpoints of Megatron-LM, ms-swift and Megatron-Bridge, read by the names of the weight plan."""
