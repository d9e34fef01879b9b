"""Going on with smaller batches when memory runs out."""

from __future__ import annotations

from ...kernel.errors import ran_out as out_of_memory

__all__ = ["out_of_memory", "smaller_batch"]


def smaller_batch(batch_size: int, error: BaseException) -> tuple[int, int]:
    """The largest batch of at most half the size that divides it, and how many make up one of it.

    Raises RuntimeError when even one sample does not fit.
    """
    if batch_size == 1:
        raise RuntimeError(
            "out of memory with a batch of one sample: no executable batch size is left. Recompute "
            "activations (gradient_checkpointing=True), shard the model (backend='fsdp'), or cut "
            "the samples shorter"
        ) from error
    size = next(n for n in range(batch_size // 2, 0, -1) if batch_size % n == 0)
    return size, batch_size // size
