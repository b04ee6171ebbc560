"""Parallel layouts as arithmetic: rank placement, pipeline splits, rules, the rank grid. No torch, no
process groups."""
