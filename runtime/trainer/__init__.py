"""A whole run: what `fit` does, by its settings, between the steps of the kernel's loop."""
