"""Launchers: one per module. They build commands; torch is not imported here."""
