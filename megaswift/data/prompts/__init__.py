"""Prompts for reinforcement learning, from rows to micro-batches with completions."""
