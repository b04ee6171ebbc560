"""Forecasts before a run: its time by roofline, and the search for a layout and settings that fit and take least. No
torch."""
