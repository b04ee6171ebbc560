"""The options of adapters, and what follows from them. No torch."""
