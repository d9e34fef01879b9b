"""Folders `checkpoint-N`: their files, their order, and reading those of other tools."""
