"""Optimizers of the native engine: updates, precision of their weights, clipping."""
