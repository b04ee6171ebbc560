"""Failures of a run: lost ranks, full memory."""
