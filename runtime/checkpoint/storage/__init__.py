"""Storage of checkpoints: a local file system, or an object store that fsspec reaches."""
