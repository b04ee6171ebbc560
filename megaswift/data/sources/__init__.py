"""Rows of a data set: its files, where they come from, how they are read and mixed."""
