"""Reads one epoch of a stream sample by sample, from any position."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..kernel.batches import Position
from ..kernel.errors import DataError, DataFailed, DrivetrainError
from .order import mix
from .random_state import seed_generators
from .user_frames import last_line

__all__ = ["OPENING", "StreamReader", "set_epoch", "set_epoch_everywhere"]

OPENING = 2
"""Distinguishes the seed of opening an epoch from those of its first sample and of a collation."""
_INCOMPLETE_STATE = "BufferShuffledExamplesIterable"
"""A class of the datasets library whose state leaves out the content of its shuffle buffer."""


class StreamReader:
    """Reads a stream, and seeds the process's generators for each sample: callers must restore
    these."""

    def __init__(self, stream: Any, seed: int, start: Position) -> None:
        self._seed, self._epoch, self.offset = seed, start.epoch, 0
        seed_generators(mix(seed, start.epoch, OPENING))
        opened = stream if hasattr(stream, "__iter__") else stream()
        set_epoch_everywhere(opened, start.epoch)
        stateful = hasattr(opened, "state_dict") and hasattr(opened, "load_state_dict")
        stateful = stateful and not _has_incomplete_state(opened)
        self._stateful = opened if stateful else None
        if stateful and start.state is not None:
            opened.load_state_dict(json.loads(json.dumps(start.state)))
            self.offset = start.samples
        self._iterator = iter(opened)
        while self.offset < start.samples:
            self._skip(start.samples)

    def next(self) -> tuple[bool, Any]:
        """Return whether there is a next sample, and the sample."""
        seed_generators(mix(self._seed, self._epoch, self.offset))
        try:
            sample = next(self._iterator)
        except StopIteration:
            return False, None
        except DrivetrainError:
            raise
        except (Exception, SystemExit) as error:
            raise DataFailed(
                f"sample {self.offset} of epoch {self._epoch} could not be read from the stream: "
                f"{last_line(error)}"
            ) from error
        self.offset += 1
        return True, sample

    def state(self) -> Mapping[str, Any] | None:
        """Return the stream's state at this position; None if it has no state."""
        if self._stateful is None:
            return None
        state = self._stateful.state_dict()
        complaint = _not_json(state, "state_dict()")
        if complaint is None and not isinstance(state, dict):
            complaint = f"state_dict() is a {type(state).__name__}"
        if complaint is not None:
            raise DataError(
                f"the state of the stream {type(self._stateful).__name__} cannot be kept in a "
                f"checkpoint: {complaint}; it may hold dicts with text as keys, lists, text, "
                "numbers, booleans and None. Without it: ReadAgain(stream), which resumes by "
                "reading the epoch again; or, where it is the order of a loader that shuffles, the "
                "data set itself, which the run shuffles"
            )
        kept: dict[str, Any] = json.loads(json.dumps(state))  # the stream may change it later
        return kept

    def _skip(self, num_samples: int) -> None:
        if not self.next()[0]:
            raise DataError(
                f"{num_samples} samples of epoch {self._epoch} were consumed, and the stream "
                f"ends after {self.offset}: it is not the one that was trained on, or an iterator "
                "of which a part was read before; give something that can be iterated over "
                "again, or a function that makes it"
            )


def _has_incomplete_state(stream: Any, depth: int = 20) -> bool:
    """True if the stream's state is known to be incomplete, as for shuffled streams of the datasets
    library."""
    if type(stream).__name__ == _INCOMPLETE_STATE:
        return True
    parts = [getattr(stream, name, None) for name in ("dataset", "_ex_iterable", "ex_iterable")]
    parts += getattr(stream, "ex_iterables", ())
    return depth > 0 and any(
        _has_incomplete_state(part, depth - 1) for part in parts if part is not None
    )


def _not_json(value: Any, where: str) -> str | None:
    """Describe the first part that JSON would not return unchanged; None if there is none."""
    if value is None or type(value) in (bool, int, str):
        return None
    if type(value) is float:
        return None if value - value == 0 else f"{where} is {value}"
    if type(value) is list:
        parts = ((item, f"{where}[{index}]") for index, item in enumerate(value))
    elif type(value) is dict:
        odd = [key for key in value if type(key) is not str or key.startswith("$")]
        if odd:
            return f"{where} has the key {odd[0]!r}"
        parts = ((item, f"{where}[{key!r}]") for key, item in value.items())
    else:
        return f"{where} is a {type(value).__name__}"
    return next((found for part, at in parts if (found := _not_json(part, at))), None)


def set_epoch_everywhere(data: Any, epoch: int) -> None:
    """Call `set_epoch` of the data and of the parts that a `DataLoader` has."""
    parts = [data, *(getattr(data, name, None) for name in ("batch_sampler", "sampler", "dataset"))]
    for part in parts:
        set_epoch(part, epoch)


def set_epoch(listener: Any, epoch: int) -> None:
    """Call `set_epoch` of the listener, if it has one."""
    if callable(method := getattr(listener, "set_epoch", None)):
        method(epoch)
