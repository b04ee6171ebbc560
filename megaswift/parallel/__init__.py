"""Parallel layouts as arithmetic: who is where, which layers go where, what is legal, what it costs. No torch, no
process groups."""
