"""Helpers for several folders of compat, which need no `Trainer`."""
