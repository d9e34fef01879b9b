"""Data loaders, samplers and collators with their numbers."""
