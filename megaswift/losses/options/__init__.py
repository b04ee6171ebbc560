"""The options and the tables of losses and estimators, and what follows from them. No torch."""
