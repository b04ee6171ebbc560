"""Folders of models, saved steps and adapters: finding, fetching and checking them. No torch."""
