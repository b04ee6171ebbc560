"""LoRA on Megatron's linear layers: placement on ranks, forward and backward, checkpoints."""
