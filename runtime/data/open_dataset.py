"""Find the kind of data that a recipe has, and open the source that reads it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

from torch.utils.data import DataLoader

from ..kernel.batches import ENDLESS, Group, Position
from ..kernel.contract import Session
from ..kernel.errors import DataError, SettingError
from ..kernel.recipe import Batch
from .indexed import Loader, is_indexed
from .mixed import MixLoader, MixStream
from .mixture import Mix
from .order import ByLength, OrderFunction, sequential, shuffled
from .prebatched import Batches, PrebatchedLoader
from .stream import StreamLoader

__all__ = ["by_sample", "once", "open_dataset"]


def open_dataset(
    data: Any,
    session: Session,
    *,
    seed: int,
    workers: int,
    drop_last: bool = False,
    num_epochs: int | None = None,
    shuffle: bool | None = False,
    by_length: int | None = None,
    lengths: Sequence[int] | None = None,
    isolate_random: bool | None = None,
    count_items: Callable[[Batch], int] | None = None,
    **settings: Any,
) -> Source:
    """Open the source for data that can be indexed, a stream, a `Mix`, or ready `Batches`. Called
    by all ranks.

    `shuffle`: None shuffles data that can be indexed. `by_length`: number of steps in a stretch of
    samples that is sorted by `lengths`. `num_epochs`: number of epochs after which a stream or
    ready batches end. `settings`: further `LoaderSettings`. Raises `DataError` for data, and
    `SettingError` for numbers, that cannot be used for training.
    """
    if isinstance(data, Mix):
        _check_mix(data, shuffle, by_length, num_epochs)
    elif shuffle and not is_indexed(data):
        raise SettingError(
            f"data.shuffle is {shuffle}, and {type(data).__name__} comes in an order of its own: "
            "shuffle it there, and leave data.shuffle out"
        )
    if by_length is not None and (lengths is None or not is_indexed(data) or shuffle is False):
        raise SettingError(
            f"data.by_length is {by_length}, which needs recipe.lengths, the length of each sample "
            "of data that can be indexed, and data.shuffle"
        )
    if isinstance(data, Batches):
        if workers:
            raise SettingError(
                f"data.workers is {workers}, and ready batches are fetched by their own loader: "
                "give the workers to that one, and set data.workers=0"
            )
        if settings.get("batch_warmup") is not None:
            raise SettingError(
                f"data.batch_warmup is {settings['batch_warmup']}, and ready batches have the "
                "sizes of their own loader: let that loader grow them, or pass the data set itself"
            )
        return PrebatchedLoader(
            data,
            session,
            seed=seed,
            num_epochs=num_epochs,
            drop_last=drop_last,
            count_items=count_items,
        )
    if isinstance(data, DataLoader) and data.batch_sampler is not None:
        raise DataError(
            "a DataLoader makes batches of its own: hand it over as Batches(loader) to train on "
            "them as they come, or give its data set and let the kernel make the batches"
        )
    settings |= {
        "seed": seed,
        "workers": workers,
        "drop_last": drop_last,
        "counts_rows": count_items is None and settings.get("collate") is not None,
        "reader_index": session.world.reader_index,
        "num_readers": session.world.num_readers,
    }
    order: OrderFunction = sequential if shuffle is False else shuffled
    if by_length is not None and lengths is not None:
        batch = settings["global_batch"]
        order = ByLength(lengths, batch, by_length * batch)
    return by_sample(
        data, order=order, isolate_random=isolate_random, num_epochs=num_epochs, **settings
    )


def by_sample(
    data: Any,
    *,
    seed: int = 0,
    order: OrderFunction = shuffled,
    isolate_random: bool | None = None,
    num_epochs: int | None = None,
    **settings: Any,
) -> Loader | StreamLoader:
    """Open the source for data that give single samples. Arguments that do not apply to its kind
    are ignored."""
    if isinstance(data, Mix) and not data.streams:
        return MixLoader(data, seed=seed, isolate_random=isolate_random, **settings)
    if is_indexed(data):
        return Loader(data, seed=seed, order=order, isolate_random=isolate_random, **settings)
    stream = MixStream(data, seed) if isinstance(data, Mix) else data
    return StreamLoader(stream, seed=seed, num_epochs=num_epochs, **settings)


def _check_mix(
    data: Mix, shuffle: bool | None, by_length: int | None, num_epochs: int | None
) -> None:
    if shuffle is False:
        raise DataError(
            "a Mix is drawn by weight, some samples often, and is there to train on, with "
            "data.shuffle left out; to evaluate give its sources: eval_data={name: data}"
        )
    if by_length is not None:
        raise SettingError(f"data.by_length is {by_length}, and a Mix has an order of its own")
    if data.streams and num_epochs is not None:
        raise SettingError("a Mix with streams has no epochs: set steps, where the run is to end")


def once(source: Source, most: int | None = None) -> Generator[Group, None, None]:
    """Yield all groups of the first epoch of an unshuffled source, or the first `most` of them, for
    evaluation."""
    every = source.steps_per_epoch or ENDLESS
    return source.groups(Position(), every if most is None else min(every, most))


class Source(Protocol):
    """The protocol of data for the loop: groups in the order of training, as one reader sees
    them."""

    @property
    def num_samples(self) -> int | None:
        """Number of samples in an epoch, over all readers; None if the length is unknown."""
        ...

    @property
    def epoch_length(self) -> int | None:
        """The value of `Position.samples` at the end of an epoch; None if the length is unknown."""
        ...

    @property
    def steps_per_epoch(self) -> int | None:
        """Number of steps in an epoch with the full global batch; None if the length is unknown."""
        ...

    def begun(self, position: Position) -> dict[str, Any]:
        """Return the order in which the epoch of `position` was begun, for a checkpoint (JSON
        types)."""
        ...

    def resume(self, position: Position, begun: Mapping[str, Any]) -> None:
        """Finish the epoch of `position` in the order `begun`. Raises `ValueError` for a value that
        `begun` did not return, and `DataError` for other data than the epoch was begun with.
        """
        ...

    def describe_continuation(self, position: Position) -> str:
        """Describe how a begun epoch continues after the length of the data has changed."""
        ...

    def length_at(self, position: Position) -> int | None:
        """Return the value of `samples` at the end of an epoch; None if the length is unknown."""
        ...

    def steps_left(self, position: Position, part: float = 1.0) -> int | None:
        """Return the steps left in the epoch of `position`, or in a part of it; None if the length
        is unknown."""
        ...

    def steps_in(self, first: int, epochs: float) -> int | None:
        """Return the steps from the beginning of epoch `first` until the run has done `epochs`
        epochs; None if the length is unknown."""
        ...

    def groups(self, start: Position, num_steps: int) -> Generator[Group, None, None]:
        """Yield the next `num_steps` groups, across epochs; fewer if the data end. Close or delete
        the generator to end its workers.

        Raises `DataError` for data that cannot be trained on, `DataFailed` if reading raised an
        error, and `WorkerFailed` if it did in a worker.
        """
        ...

    def where(self, position: Position, num_samples: int) -> str:
        """Describe where the samples of a group are found in the data."""
        ...
