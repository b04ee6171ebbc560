"""Commands of `megaswift` that do not train: checks, conversion, jobs; and the entry of those that do."""
