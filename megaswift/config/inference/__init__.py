"""Options of infer, deploy and export: declarations, parser and checks."""
