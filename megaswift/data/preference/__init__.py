"""Preference pairs and labeled completions, from rows to micro-batches."""
