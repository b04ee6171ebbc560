"""The parts of a run: the options of each part, declared with help, unit, range and the variants that have them."""
