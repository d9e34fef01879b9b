"""The commands and their arguments; the modules that they import when called do the work."""
