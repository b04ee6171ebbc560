"""The tasks of embedding models and rerankers."""
