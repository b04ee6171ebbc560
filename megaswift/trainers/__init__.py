"""Training: one loop over the Engine protocol, and hooks for all that surrounds it.

Owns what happens on a rank from configuration to export (`run`), the loop, its hooks and the output directory.
Leaves out the model and its parallelism (engine), the objective (losses) and what a sample is (data).
"""
