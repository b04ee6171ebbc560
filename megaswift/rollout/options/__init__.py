"""The options of the sampler and of its servers. No torch."""
