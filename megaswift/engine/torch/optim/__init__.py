"""Optimizers of the torch engine, their states and the loss scale."""
