"""Samples completions of prompts, scores them with rewards, and writes the best as a data set."""
