"""Layer 1: the options of `megaswift sample`."""
