"""Rows with labels: texts with classes or numbers, and words with tags."""
