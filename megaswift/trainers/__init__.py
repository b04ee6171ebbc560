"""Training: one loop over the Engine protocol, with hooks for everything else.

Owns what happens on a rank from configuration to export (`run`), the loop, its hooks and the output directory.
Leaves out the model and its parallelism (engine), the objective (losses) and what a sample is (data).
"""
