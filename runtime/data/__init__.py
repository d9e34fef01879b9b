"""Data: the order of samples, their distribution over feeders, and fetching them."""
