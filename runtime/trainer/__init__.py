"""A whole run: what `fit` does between the steps of the kernel's loop, as the settings say."""
