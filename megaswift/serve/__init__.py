"""Layer 5: generation with a loaded model in the terminal, for prompt files, and over HTTP."""
