"""Losses as pure functions of the engine's outputs. `contract` defines the interface."""
