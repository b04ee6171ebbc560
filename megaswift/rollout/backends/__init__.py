"""Sampler backends, one per module; `--rollout_backend` gives the module's name."""
