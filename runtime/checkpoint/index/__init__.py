"""Where each tensor lies in a checkpoint of many files."""
