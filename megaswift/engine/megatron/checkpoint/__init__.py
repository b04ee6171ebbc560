"""Saving and loading the engine's state, resharded on load."""
