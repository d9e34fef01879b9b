"""A session of several processes over torch.distributed."""
