"""The options of distillation. No torch."""
