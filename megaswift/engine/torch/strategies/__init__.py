"""Data-parallel strategies: DDP, FSDP2 and DeepSpeed's ZeRO."""
