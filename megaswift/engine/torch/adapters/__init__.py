"""Adapters of PEFT on the torch engine."""
