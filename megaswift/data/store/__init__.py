"""Tokens on disk: the stores, their folders and the documents in them."""
