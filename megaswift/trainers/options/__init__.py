"""The options of the train loop, its hooks and its schedule, and what follows from them. No torch."""
