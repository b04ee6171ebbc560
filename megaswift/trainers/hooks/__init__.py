"""Hooks of the train loop."""
