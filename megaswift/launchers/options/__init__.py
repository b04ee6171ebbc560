"""The options of launchers, and what follows from them and from the environment. No torch."""
