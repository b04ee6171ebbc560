"""Checks of this machine and its software for `megaswift doctor`: each returns findings, and changes nothing."""
