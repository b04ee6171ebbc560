"""The order of a run: what is checked, built and written."""
