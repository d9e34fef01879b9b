"""The index of a checkpoint of many files: the files that hold each tensor."""
