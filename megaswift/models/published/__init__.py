"""config.json of published models, with the number of parameters on their model cards."""
