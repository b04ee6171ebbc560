"""Memory of a run on one device, computed before the run: formulas over the model, the options and the layout. No
torch."""
