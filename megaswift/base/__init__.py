"""Modules without torch that import nothing of ours but errors and messages."""
