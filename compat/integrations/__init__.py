"""Other libraries and services that a `Trainer` can use."""
