"""Layer 1: typed, validated configuration. One section a file, one loader for YAML, JSON, flags and Python. No
torch."""

from megaswift.config.swift_config import SwiftConfig, load_config

__all__ = ["SwiftConfig", "load_config"]
