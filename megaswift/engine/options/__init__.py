"""The options of engines and optimizers, and what follows from them. No torch."""
