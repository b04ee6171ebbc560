"""Layer 5: inference with any model that transformers loads, placed on the available devices."""
