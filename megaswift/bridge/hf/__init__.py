"""Hugging Face model folders: reading, writing and checking them."""
