"""Data: the order of samples, their distribution over readers, and fetching them."""
