"""Layer 5: answers of a loaded model in the terminal, from a file of prompts, and over HTTP."""
