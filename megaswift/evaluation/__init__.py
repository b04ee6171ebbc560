"""Evaluates models: tasks of lm-evaluation-harness, files of questions, and the comparison of two results."""
