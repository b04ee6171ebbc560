"""Layer 5: samplers of reinforcement learning, and how new weights reach them."""
