"""The kernel's data source for a Trainer's loader: groups of microbatches, an epoch at a time."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch.utils.data import DataLoader

from ...data.own_generators import OpenedEpochs, begun_as_before, end_workers, own_states, states_of
from ...data.sample_digest import digest_of
from ...kernel.batches import Group, Microbatch, Position
from ...kernel.errors import CheckpointDamaged, DataError
from ...kernel.recipe import Batch
from ..data.rank_batches import RankStream
from ..data.sharding import RankLoader, skip_first_batches
from ..data.worker_states import WorkerStates
from .training_step import StepMixin

__all__ = ["Epochs", "RunLength", "no_batches"]

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


def no_batches(num_samples: int) -> ValueError:
    """Return the error for an epoch of `num_samples` samples without a batch."""
    return ValueError(
        f"{num_samples} training samples make no batch: with drop_last an epoch holds full ones "
        "alone. Lower per_device_train_batch_size, or leave it out"
    )


@dataclass(eq=False)
class Epochs:
    """The groups of a loader: `accumulation` batches per update, fewer at the end of an epoch.

    Positions count samples of the global order, so that a run can resume at another world size.
    """

    trainer: StepMixin
    loader: Any
    accumulation: int
    batches_per_epoch: int
    """The number of batches of a full epoch; a stream may end earlier."""
    updates_per_epoch: int
    num_epochs: int
    global_batch: int
    """Samples of one batch over all feeders."""
    start_over: bool = False
    """Start the resumed epoch over, instead of skipping the samples that were trained on."""
    around_first: AbstractContextManager[None] | None = None
    """A context manager entered once, around reading the first batch, which may draw random
    numbers."""
    before_partition: Callable[[Batch], Batch] | None = None
    """A function applied to each batch before a driver partitions its sequences."""
    _reading: Any = None
    """The loader of the current epoch."""
    counts: deque[Any] = field(default_factory=deque)
    """The results of `get_batch_samples` for each group that was read but not trained on yet."""

    _compared: bool = False

    def __post_init__(self) -> None:
        self._opened = OpenedEpochs(self.loader, of_process=True)
        loader = self.loader
        noted = isinstance(loader, RankLoader) and loader.in_order
        self._workers = WorkerStates(loader.num_workers if noted else 0)

    def groups(self, start: Position, num_steps: int) -> Generator[Group, None, None]:
        """Yield the rest of the epoch of `start`; nothing after the last epoch."""
        if start.epoch >= self.num_epochs:
            return
        trainer, skipped = self.trainer, 0 if self.start_over else start.samples
        self.start_over = False
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
                if done:  # a stream that ended here, which its loader did not detect
                    yield from self.groups(Position(start.epoch + 1), num_steps)
                else:
                    self._warn_of_nothing(start.epoch)
                return
            self._refuse_split_stream()
            self.counts.append(num_items)
            before, done, update = done, done + len(fetched), update + 1
            last = len(fetched) < wanted or not self._num_batches(update) or self._is_at_end()
            yield Group(
                self._position(start.epoch, before),
                Position(start.epoch + 1) if last else self._position(start.epoch, done),
                len(fetched) * self.global_batch,
                len(fetched),
                self._microbatches(fetched, before * self.global_batch),
                0.0 if num_items is None else float(num_items),
            )
            if last:
                return

    def batches_done(self, group: Group) -> int:
        """Return the number of batches of the epoch that are done after this group."""
        return group.position.samples // self.global_batch + group.num_microbatches

    def _batches(self, epoch: int, skipped: int) -> Iterator[Batch]:
        workers = self._workers
        first = workers.first_batch(epoch, skipped)
        loader = skip_first_batches(self.loader, first) if first else self.loader
        if isinstance(loader, RankLoader):
            loader.plain = not isinstance(self.loader, RankLoader)
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        if self._reading is not self.loader:
            end_workers(self._reading)
        self._reading = loader
        self._opened.open(epoch)
        if isinstance(loader, RankLoader):
            loader.notes_state = True
            loader.workers = workers if workers.count else None
            loader.first_batch, loader.batches_again = first, skipped - first
            loader.around_first, self.around_first = self.around_first, None
            return iter(loader)
        if isinstance(loader, DataLoader):
            with begun_as_before(loader, epoch):
                return iter(loader)
        return iter(loader)

    def _refuse_split_stream(self) -> None:
        """Raises `DataError` on all ranks if ranks have read different samples of a stream that is
        shared out over them. Checked once, and not in data workers."""
        stream = getattr(self._reading, "dataset", None)
        if self._compared or not isinstance(stream, RankStream) or self._reading.num_workers:
            return
        self._compared = True
        session = self.trainer.driver_session.session
        digests = session.exchange(digest_of(stream.first))
        if len({*digests}) > 1:
            ranks = ", ".join(f"rank {rank} {digest}" for rank, digest in enumerate(digests))
            raise DataError(
                f"ranks read different samples of train_dataset ({type(stream.dataset).__name__}; "
                f"digests of the first ones: {ranks}), of which each keeps its share: the stream "
                "is split by rank already, or shuffled by another seed on each. Give it as it was "
                "before it was split; or set rank_aware=True on it (train_dataset.rank_aware = "
                "True), and each rank trains on all that its own stream gives"
            )

    # --- saving and resuming --------------------------------------------------------------

    def begun(self, position: Position) -> dict[str, Any]:
        """Return the states of the loader's own generators when the epoch of `position` was opened,
        for a checkpoint (JSON types). Called by all ranks."""
        session = self.trainer.driver_session.session
        everyone = session.exchange(self._opened.to_json(position.epoch))
        return {"generators": states_of(everyone)} if any(everyone) else {}

    def resume(self, position: Position, begun: Any) -> None:
        """Open the epoch of `position` with the states `begun`. Raises `CheckpointDamaged` for
        anything but a result of `begun`, and `DataError` for the states of another loader."""
        if not begun:
            return
        world = self.trainer.driver_session.session.world
        try:
            own = own_states(dict(begun).get("generators"), world.rank, world.size)
            self._opened.resume(position.epoch, own)
        except (TypeError, ValueError) as error:
            raise CheckpointDamaged(f"the order of a begun epoch is malformed: {error}") from error

    def worker_states(self, position: Position) -> bytes | None:
        """Return the states of this rank's data workers for a run that resumes at `position`; None
        if there are no workers, or their states are unknown."""
        return self._workers.to_bytes(position.epoch, position.samples // self.global_batch)

    def resume_workers(self, position: Position, states: bytes) -> bool:
        """Begin the epoch of `position` with data workers in these `states`. Return False if the
        number of workers differs. Raises `CheckpointDamaged` for malformed states."""
        try:
            done = position.samples // self.global_batch
            return self._workers.resume(position.epoch, done, states)
        except ValueError as error:
            raise CheckpointDamaged(str(error)) from error

    @property
    def state_ahead(self) -> tuple[Any, ...] | None:
        """Return the state of the host's generators before the next batch of this epoch was read;
        None if it is unknown, as with data workers."""
        return getattr(self._reading, "state_ahead", None)

    def _is_at_end(self) -> bool:
        """True if a stream of unknown length has yielded its last batch."""
        return bool(getattr(self._reading, "end_of_dataloader", False))

    def _num_batches(self, update: int) -> int:
        """Return the number of batches in the n-th update of an epoch; 0 after the last."""
        if update >= self.updates_per_epoch:
            return 0
        done = update * self.accumulation
        return min(self.accumulation, max(1, self.batches_per_epoch - done))

    def _position(self, epoch: int, batches: int) -> Position:
        return Position(epoch, batches * self.global_batch)

    @cached_property
    def _share(self) -> tuple[int, int]:
        """Start and number of this reader's samples of a batch over all feeders. The last batch of
        an epoch may have fewer."""
        world = self.trainer.driver_session.world
        count = max(1, self.global_batch // world.num_readers)  # 0 would count for nothing
        return world.reader_index * count, count

    def _microbatches(self, fetched: list[Batch], start: int) -> Iterator[Microbatch]:
        own, count = self._share
        start += own
        for batch in fetched:
            whole = batch if self.before_partition is None else self.before_partition(batch)
            yield Microbatch(whole, count, start)
            start += self.global_batch

    def _warn_of_nothing(self, epoch: int) -> None:
        _LOG.warning(
            "the training data gave no sample in epoch %s: training ends at step %s of %s. A "
            "stream that can be read once only ends like this; give one that can be read again",
            epoch,
            self.trainer.state.global_step,
            self.trainer.state.max_steps,
        )
