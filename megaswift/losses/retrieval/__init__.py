"""Losses and metrics of embedding models and rerankers, on groups of documents."""
