"""Rows of a query and its documents, for embedding models and rerankers."""
