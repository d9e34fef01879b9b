"""Data: the order of samples, their partition over readers, and fetching them."""
