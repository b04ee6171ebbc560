"""Rewards of completions: built-in and user functions, reward models, and programs in a sandbox.

`contract` is the seam to the trainer. Reading prompts, sampling and advantages are elsewhere.
"""
