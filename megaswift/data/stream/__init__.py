"""Rows read on demand, for data that does not fit into the cache."""
