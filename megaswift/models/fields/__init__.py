"""Rows of a family's configuration table: fields of config.json and what they mean."""
