"""The formats of a checkpoint's files: tensors, their regions, and JSON."""
