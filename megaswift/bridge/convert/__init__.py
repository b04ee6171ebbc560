"""The converters: the loop over a model's tensors, its resumable output, and comparisons of weights."""
