"""What exists only without CUDA: replacements for CUDA calls in Megatron-Core, and collectives over gloo and shared
memory."""
