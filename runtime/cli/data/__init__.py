"""Makes data to train on: texts become shards of tokens."""
