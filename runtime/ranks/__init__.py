"""Ranks that are started from Python, as in a cell of a notebook."""
