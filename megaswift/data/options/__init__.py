"""The options of data sets and templates, and what follows from them. No torch."""
