"""A Trainer's own loader, as the kernel takes data: groups of microbatches, an epoch at a time."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

from ...kernel.batches import Group, Microbatch, Position
from ...kernel.recipe import Batch
from ..data.sharding import skip_first_batches
from .training_step import StepMixin

__all__ = ["Epochs", "RunLength"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunLength:
    """The length of a call of `train`, from `set_initial_training_values`."""

    num_epochs: int
    updates_per_epoch: int
    num_examples: int
    num_train_samples: float
    total_batch: int
    batches_per_epoch: int
    max_steps: int


@dataclass(eq=False)
class Epochs:
    """The groups of a loader: `accumulation` batches an update, fewer at the end of an epoch.

    Positions count samples of the global order, so that a run resumes at another world size.
    """

    trainer: StepMixin
    loader: Any
    accumulation: int
    batches_per_epoch: int
    """The batches of a full epoch; a stream may end earlier."""
    updates_per_epoch: int
    num_epochs: int
    global_batch: int
    """Samples of one batch over all feeders."""
    start_anew: bool = False
    """Begin the epoch that is resumed again, instead of skipping what was seen."""
    after_first_fetch: Callable[[], None] | None = None
    """Called once, when the first group has been read: reading may draw random numbers."""
    before_cut: Callable[[Batch], Batch] | None = None
    """Done to each batch whose sequences a driver will cut."""
    _reading: Any = None
    """The loader of the epoch under way."""
    counts: deque[Any] = field(default_factory=deque)
    """The counts of `get_batch_samples` for each group that was read and not yet trained on."""

    def groups(self, start: Position, num_steps: int) -> Generator[Group, None, None]:
        """The rest of the epoch of `start`; nothing after the last epoch."""
        if start.epoch >= self.num_epochs:
            return
        trainer, skipped = self.trainer, 0 if self.start_anew else start.samples
        self.start_anew = False
        trainer.control = trainer.callback_handler.on_epoch_begin(
            trainer.args, trainer.state, trainer.control
        )
        done = skipped // self.global_batch
        batches, device = self._batches(start.epoch, done), trainer.args.device
        update = done // self.accumulation
        for _ in range(num_steps):
            wanted = self._num_batches(update)
            if not wanted:
                return
            fetched, num_items = trainer.get_batch_samples(batches, wanted, device)
            if not fetched:
                if done:  # a stream that ended there, whose loader has not said so
                    yield from self.groups(Position(start.epoch + 1), num_steps)
                else:
                    self._warn_of_nothing(start.epoch)
                return
            if self.after_first_fetch is not None:
                self.after_first_fetch()
                self.after_first_fetch = None
            self.counts.append(num_items)
            before, done, update = done, done + len(fetched), update + 1
            last = len(fetched) < wanted or not self._num_batches(update) or self._is_at_end()
            yield Group(
                self._position(start.epoch, before),
                Position(start.epoch + 1) if last else self._position(start.epoch, done),
                len(fetched) * self.global_batch,
                len(fetched),
                self._microbatches(fetched),
                0.0 if num_items is None else float(num_items),
            )
            if last:
                return

    def batches_done(self, group: Group) -> int:
        """Of its epoch, after that group."""
        return group.position.samples // self.global_batch + group.num_microbatches

    def _batches(self, epoch: int, skipped: int) -> Iterator[Batch]:
        loader = skip_first_batches(self.loader, skipped) if skipped else self.loader
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        self._reading = loader
        return iter(loader)

    def _is_at_end(self) -> bool:
        """True if a stream, of which nobody knew the length, has given its last batch."""
        return bool(getattr(self._reading, "end_of_dataloader", False))

    def _num_batches(self, update: int) -> int:
        """Number of batches in the n-th update of an epoch; 0 after the last."""
        if update >= self.updates_per_epoch:
            return 0
        done = update * self.accumulation
        return min(self.accumulation, max(1, self.batches_per_epoch - done))

    def _position(self, epoch: int, batches: int) -> Position:
        return Position(epoch, batches * self.global_batch)

    def _microbatches(self, fetched: list[Batch]) -> Iterator[Microbatch]:
        for batch in fetched:
            whole = batch if self.before_cut is None else self.before_cut(batch)
            yield Microbatch(whole, self.global_batch, 0, 1)

    def _warn_of_nothing(self, epoch: int) -> None:
        _LOG.warning(
            "the training data gave no sample in epoch %s: training ends at step %s of %s. A "
            "stream that can be read once only ends like this; give one that can be read again",
            epoch,
            self.trainer.state.global_step,
            self.trainer.state.max_steps,
        )
