"""Rewards of completions: built-in and user functions, reward models, and programs in a sandbox.

`scoring` is the interface to the trainer. Reading prompts, sampling and advantages are elsewhere.
"""
