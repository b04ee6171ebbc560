"""Rules of a family's weight table: Megatron parameters as pieces of Hugging Face tensors."""
