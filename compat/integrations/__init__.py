"""Other libraries and services that a `Trainer` can be told to use."""
