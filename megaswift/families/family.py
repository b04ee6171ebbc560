"""Where a family file registers itself; families from outside this package use the same path."""

from megaswift.models.family import FAMILIES, Family

__all__ = ["FAMILIES", "Family"]
