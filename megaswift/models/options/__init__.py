"""The options of the model, and what follows from them. No torch."""
