"""Data loaders, samplers and collators that give the same batches as HF's."""
