"""The native engine, on Megatron-Core. The only package that imports `megatron` or Transformer Engine."""
