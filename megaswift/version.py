"""The version of this package, for help, reports and the files it writes."""

__version__ = "0.1.0"
