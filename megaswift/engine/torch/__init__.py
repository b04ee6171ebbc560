"""The second engine: transformers models under DDP, FSDP2 or DeepSpeed's ZeRO, for models that need no model
parallelism.

Thin: torch, DeepSpeed and PEFT do the work. Owns making them compute the same numbers as the native engine.
"""
