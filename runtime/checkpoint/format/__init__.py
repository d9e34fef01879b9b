"""What stands in the files of a checkpoint: tensors, their regions, and JSON."""
