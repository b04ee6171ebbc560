"""One sampler backend a file; `--rollout_backend` names the file."""
