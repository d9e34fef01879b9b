"""Ranks that are started from Python, such as from a notebook cell."""
