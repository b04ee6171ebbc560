"""Combinations of options that a part refuses, one module a part."""
