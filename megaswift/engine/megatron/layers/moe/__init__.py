"""Mixture-of-experts parts of the native engine's layers: router, dispatcher, experts and their products."""
