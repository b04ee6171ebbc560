"""Embeddings, scores and classes over HTTP and for files."""
