"""The options of reinforcement learning, and what follows from them. No torch."""
