"""The native engine, on Megatron-Core. The only package that imports `megatron` or Transformer Engine.

Importing it makes Megatron-Core run on a machine without CUDA: its decorators run at import, so this has to come first.
"""

from megaswift.engine.megatron.cpu import patches

patches.install_cpu_patches()
