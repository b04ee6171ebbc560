"""Layer 5: any model that transformers loads, spread over what devices there are; answers in the terminal, from a file,
over HTTP."""
