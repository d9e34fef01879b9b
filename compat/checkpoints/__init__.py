"""Folders `checkpoint-N`: written, found, read, and deleted."""
