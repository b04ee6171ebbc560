"""The options of infer, deploy and export: declared, parsed and checked. No torch."""
