"""Memory of a Trainer: measurement of each phase by transformers, if requested, and handling of
out-of-memory errors."""

from __future__ import annotations

import importlib.util
from typing import Any

from ...kernel.errors import OutOfMemory, ran_out
from ..theirs import theirs
from .diagnostics import Diagnostics

__all__ = ["lacks_memory", "memory_tracker", "name_largest_parts", "smaller_batch", "what_to_do"]


class _Nothing:
    """A memory tracker that measures nothing."""

    def start(self) -> None: ...

    def stop_and_update_metrics(self, metrics: dict[str, Any] | None = None) -> None: ...


def memory_tracker(skip_memory_metrics: bool) -> Any:
    """Return transformers' `TrainerMemoryTracker`, which identifies phases by the names of the
    calling methods. Raises ImportError if psutil is missing, which the tracker needs.
    """
    if skip_memory_metrics:
        return _Nothing()
    if importlib.util.find_spec("psutil") is None:
        raise ImportError("skip_memory_metrics=False measures by psutil: pip install psutil")
    return theirs("trainer_utils", "TrainerMemoryTracker")()


def lacks_memory(error: BaseException) -> bool:
    """True for an out-of-memory error, also in the update."""
    return ran_out(error) or isinstance(error, OutOfMemory)


def what_to_do(args: Any, batch_size: int) -> str:
    """Suggest remedies for a step on batches of this size that did not fit into memory."""
    to_do = [
        "recompute activations (gradient_checkpointing=True)",
        "shard the model (backend='fsdp')",
    ]
    if (less := _largest_part(batch_size)) is not None:
        accumulation = args.gradient_accumulation_steps * batch_size // less
        to_do.insert(
            0,
            f"start again with per_device_train_batch_size={less} and "
            f"gradient_accumulation_steps={accumulation}, which keeps the global batch",
        )
    if not args.auto_find_batch_size:
        to_do.append("let batches shrink where all ranks run out (auto_find_batch_size=True)")
    return ", or ".join(to_do)


def name_largest_parts(error: Exception, reports: Diagnostics | None) -> str:
    """Add to an out-of-memory error a sentence on the largest parts of memory, if `memory_parts`
    requests it. Return it to follow another sentence."""
    if reports is None or not (sentence := reports.largest_parts()):
        return ""
    error.args = (f"{error}. {sentence}", *error.args[1:])
    return f". {sentence}"


def smaller_batch(batch_size: int, error: BaseException) -> int:
    """Return the largest batch size of at most half the size that divides it.

    Raises RuntimeError if not even one sample fits.
    """
    less = _largest_part(batch_size)
    if less is None:
        raise RuntimeError(
            "out of memory with a batch of one sample: no executable batch size is left. Recompute "
            "activations (gradient_checkpointing=True), shard the model (backend='fsdp'), or "
            "shorten the samples"
        ) from error
    return less


def _largest_part(batch_size: int) -> int | None:
    sizes = range(batch_size // 2, 0, -1)
    return next((size for size in sizes if batch_size % size == 0), None)
