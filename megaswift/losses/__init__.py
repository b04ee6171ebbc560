"""Losses as pure functions over what the engine computed. `contract` is the seam."""
