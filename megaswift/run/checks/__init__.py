"""What is checked and settled before a run."""
