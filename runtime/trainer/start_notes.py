"""Notes at the start of a run about settings that are allowed but are often mistakes."""

from __future__ import annotations

from collections.abc import Iterator

from ..data.open_dataset import Source
from .optimizer_record import OptimizerRecord
from .settings import Settings

__all__ = ["start_notes"]

_SHOWN = 10


def start_notes(
    settings: Settings, total_steps: int | None, source: Source, optimizer: OptimizerRecord
) -> Iterator[str]:
    """Yield the notes. `total_steps`: steps of the run; None if the length of its data decides."""
    if names := optimizer.left_out:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        yield (
            f"recipe.optimizer was not given {', '.join(names[:_SHOWN])}{more}: they require a "
            "gradient, and will not learn. Give them to it, or freeze them (requires_grad=False)"
        )
    samples = source.num_samples
    if samples is not None and samples < settings.global_batch:
        yield (
            f"global_batch is {settings.global_batch}, and train_data has {samples} samples: each "
            f"step is of {samples} at most"
        )
    warmup = settings.schedule.warmup
    if total_steps is not None and warmup >= 1 and warmup >= total_steps:
        yield (
            f"schedule.warmup is {warmup:g} steps, and the run has {total_steps}: the learning "
            "rate does not reach its full height. Below 1 it is a share of the steps"
        )
    growing = settings.data.batch_warmup
    if total_steps is not None and growing is not None and growing >= total_steps:
        yield (
            f"data.batch_warmup is {growing} steps, and the run has {total_steps}: its batches do "
            f"not reach global_batch, which is {settings.global_batch}"
        )
