"""Sampler engines as Ray actors: placed, restarted and brought up to date while a run goes on."""
