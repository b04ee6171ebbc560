"""Layer 1: what an option is, and how the options of a command are read from files, command lines and Python. Imports
no part. No torch."""
