"""Reinforcement learning: from prompts to the steps of a policy."""
