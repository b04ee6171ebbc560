"""Rewards of completions: functions by name or of the user's own, reward models, and code that runs in a sandbox.

`contract` is the seam to the trainer. Reading prompts, sampling and advantages are elsewhere.
"""
