"""The options of the layout, and what follows from them."""
