"""Sources for a `Mix`: as data that can be indexed, or, with streams in it, as a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from ..kernel.batches import Position
from ..kernel.errors import DataError, DrivetrainError
from .indexed import Loader
from .mixture import Joined, Mix, draw_indices, fetched
from .order import Order, mix
from .partition import named_samples
from .positions import position_from_json, position_to_json
from .reading import StreamReader

__all__ = ["MixLoader", "MixStream"]

T = TypeVar("T")

_AHEAD = 64
"""Number of draws that are looked up at once."""


class MixLoader(Loader):
    """The groups of a mixture of data that can be indexed.

    The draws of a run are one sequence over all epochs of the run; a source is nearly always in the
    middle of an epoch of its own. So every checkpoint holds the seed, the lengths, and the draws so
    far. A resume whose past draws would differ is refused; the future may change.
    """

    def __init__(self, mixture: Mix, **settings: Any) -> None:
        self.mixture, self._drawn_by = mixture, settings.get("seed", 0)
        super().__init__(Joined(mixture), order=mixture.order, **settings)

    def begun(self, position: Position) -> dict[str, Any]:
        """See `Source`."""
        drawn = self.mixture.drawn(self._draws(position))
        return {"seed": self._drawn_by, "lengths": self.mixture.lengths, "drawn": drawn}

    def resume(self, position: Position, begun: Mapping[str, Any]) -> None:
        """See `Source`."""
        if position == Position() and not begun:
            return
        match begun:
            case {"seed": int(seed), "lengths": dict(lengths), "drawn": dict(drawn)}:
                pass
            case {"drawn": _}:
                raise ValueError(f"not the draws of a mixture: {dict(begun)!r:.200}")
            case _:
                raise DataError(
                    "the checkpoint was not trained on a Mix: continue with the data that it was "
                    "trained on, or use only its weights"
                )
        check_past(self.mixture, self._draws(position), drawn, lengths)
        self._drawn_by = seed

    def describe_continuation(self, position: Position) -> str:
        """See `Source`."""
        return "the sources continue where they were, and an epoch ends by the present length"

    def where(self, position: Position, num_samples: int) -> str:
        """See `Source`."""
        indices = self._open(position.epoch).read(position.samples, 0, num_samples)
        found = ", ".join(f"{name}[{own}]" for name, own in map(self.dataset.find, indices))
        return f"{named_samples(position, num_samples)} ({found})"

    def _draws(self, position: Position) -> int:
        return position.epoch * self.mixture.length + position.samples

    def _order(self, epoch: int) -> Order:
        return self.mixture.order(self.num_samples, self._drawn_by, epoch)


def check_past(
    mixture: Mix, draws: int, drawn: Mapping[str, int], lengths: Mapping[str, int | None]
) -> None:
    """Raises `DataError`, naming the source, if this mixture cannot have made the draws so far."""
    now = mixture.drawn(draws)
    for name in {**drawn, **now}:
        had = drawn.get(name, 0)
        if name not in now:
            if had:
                raise DataError(
                    f"source {name!r} gave {had} of the samples so far, and is in the Mix no more: "
                    "keep it, and set its weight to 0 in a stage from here on"
                )
            continue
        if had and lengths.get(name) != mixture.lengths[name]:
            raise DataError(
                f"source {name!r} had {lengths.get(name)} samples, and has "
                f"{mixture.lengths[name]}: its order would be another. Give what is new as a "
                "source of its own, in a stage from here on"
            )
        if had != now[name]:
            raise DataError(
                f"source {name!r} gave {had} of the first {draws} samples, and by these weights "
                f"it would have been {now[name]}: weights of the past stay; change those to come "
                f"with stages=[({draws}, {{{name!r}: weight}})]"
            )


class MixStream:
    """The samples of a mixture as a stream that never ends, with a state."""

    def __init__(self, mixture: Mix, seed: int) -> None:
        self.mixture, self._seed = mixture, seed
        self._samples = 0
        self._from: Mapping[str, Any] = {}
        self._positions: dict[str, Callable[[], Position]] = {}

    def __iter__(self) -> Iterator[Any]:
        mixture, readers = self.mixture, self._open()
        while True:
            at = self._samples
            for number in mixture.sources(at, at + _AHEAD).tolist():
                sample = next(readers[number])
                self._samples += 1
                yield sample

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the mixture and of each stream."""
        return {
            "samples": self._samples,
            "seed": self._seed,
            "lengths": self.mixture.lengths,
            "drawn": self.mixture.drawn(self._samples),
            "streams": {name: position_to_json(at()) for name, at in self._positions.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises `DataError` for a state of another mixture."""
        match state:
            case {
                "samples": int(samples),
                "seed": int(seed),
                "lengths": dict(lengths),
                "drawn": dict(drawn),
                "streams": dict(streams),
            }:
                check_past(self.mixture, samples, drawn, lengths)
                self._samples, self._seed, self._from = samples, seed, streams
            case _:
                raise DataError(f"the state of the data is not that of a Mix: {dict(state)!r:.200}")

    def _open(self) -> list[Iterator[Any]]:
        readers: list[Iterator[Any]] = []
        drawn = self.mixture.drawn(self._samples)
        for name, data in self.mixture.data.items():
            seed, size = mix(self._seed, *name.encode()), self.mixture.lengths[name]
            if size is not None:
                readers.append(_shuffled(name, data, seed, size, drawn[name]))
                continue
            start = position_from_json(self._from.get(name, {"epoch": 0, "samples": 0}))
            stream = _Stream(name, data, seed, start)
            self._positions[name] = stream.position
            readers.append(iter(stream))
        return readers


def _shuffled(name: str, data: Any, seed: int, size: int, drawn: int) -> Iterator[Any]:
    """Yield the shuffled samples of a source from a draw on, endlessly."""
    while True:
        indices = draw_indices(size, seed, drawn, _AHEAD).tolist()
        yield from (fetched(data, name, index) for index in indices)
        drawn += len(indices)


class _Stream:
    """A stream that is read again and again."""

    def __init__(self, name: str, stream: Any, seed: int, start: Position) -> None:
        self._name, self._stream, self._seed, self._start = name, stream, seed, start
        self._reading: StreamReader | None = None

    def position(self) -> Position:
        if self._reading is None:
            return self._start
        return Position(self._start.epoch, self._reading.offset, self._reading.state())

    def __iter__(self) -> Iterator[Any]:
        while True:
            self._reading = self._named(lambda: StreamReader(self._stream, self._seed, self._start))
            reading = self._reading
            found, sample = self._named(reading.next)
            if not found and not self._start.samples:
                raise DataError(
                    f"source {self._name!r} ({type(self._stream).__name__}) holds no samples in "
                    f"epoch {self._start.epoch}: it is empty, or can be read only once"
                )
            while found:
                yield sample
                found, sample = self._named(reading.next)
            self._start, self._reading = Position(self._start.epoch + 1), None

    def _named(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except DrivetrainError as error:
            raise type(error)(f"source {self._name!r}: {error}") from error.__cause__
