"""Models as data: what a model is, what a family's two tables are made of, and checks that need no weights.

The tables themselves are in `megaswift.families`. Reading and writing tensors belongs to the bridge.
"""
