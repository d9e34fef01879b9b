"""Runs the step of a run without its memory: tensors have shapes, and no elements."""
