"""The random generators of a user's loader: their states when an epoch is opened.

A loader that shuffles by its own generator gives each epoch another order, which depends on the
generator's state when the epoch is opened. So a checkpoint holds that state, and a resumed run
opens the epoch with it.
"""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from ..kernel.errors import DataError

__all__ = [
    "OpenedEpochs",
    "begun_as_before",
    "end_workers",
    "generators_of",
    "own_states",
    "set_state_of",
    "state_of",
    "states_of",
]

_PARTS = ("batch_sampler", "sampler", "dataset", "data_source")
"""Attributes of a loader, and of its parts, that may hold generators."""
_LIBRARIES = {"torch", "python", "numpy"}
_RANDOM_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def generators_of(loader: Any, of_process: bool = False) -> list[Any]:
    """Return the generators of torch, Python and NumPy in the attributes of a loader, its samplers
    and its data set, each once. Parts with a true `draws_by_epoch` are left out. `of_process`:
    include torch's default generator if a torch sampler has no generator and so draws from the
    default one."""
    found: list[Any] = []
    parts, seen = [loader], set[int]()
    while parts:
        part = parts.pop(0)
        attributes = getattr(part, "__dict__", {})
        if id(part) in seen:
            continue
        seen.add(id(part))
        parts += [attributes[name] for name in _PARTS if name in attributes]
        if getattr(part, "draws_by_epoch", False):
            continue
        found += [value for value in attributes.values() if _is_own_generator(value)]
        if of_process and isinstance(part, _RANDOM_SAMPLERS) and part.generator is None:
            found.append(torch.default_generator)
    return list({id(generator): generator for generator in found}.values())


def end_workers(loader: Any) -> None:
    """End a DataLoader's persistent workers, so that the next epoch starts new ones: their state
    (the data set's epoch, random numbers) is of the epoch in which they were started."""
    if isinstance(loader, DataLoader) and loader._iterator is not None:
        loader._iterator._shutdown_workers()  # type: ignore[attr-defined]
        loader._iterator = None


@contextmanager
def begun_as_before(loader: DataLoader[Any], epoch: int) -> Iterator[None]:
    """Open an epoch of a DataLoader in the block. Persistent workers draw their seed only in the
    first epoch of a run, and from the generator that a sampler draws its order from. If a resumed
    run must start them in a later epoch, they take the seed from a separate generator."""
    if not (epoch and loader.persistent_workers and loader._iterator is None):
        yield
        return
    own, loader.generator = loader.generator, torch.Generator().manual_seed(epoch)
    try:
        yield
    finally:
        loader.generator = own


class OpenedEpochs:
    """The states of a loader's generators when its latest epochs were opened. `of_process`: see
    `generators_of`."""

    def __init__(self, loader: Any, of_process: bool = False) -> None:
        self._generators = generators_of(loader, of_process)
        self._states: dict[int, list[Any]] = {}

    def open(self, epoch: int) -> None:
        """Restore the generators to their states when this epoch was first opened, by this run or
        by the run that it resumes. Call it right before the epoch is opened."""
        if epoch in self._states:
            for generator, state in zip(self._generators, self._states[epoch], strict=True):
                set_state_of(generator, state)
        self._states = {e: s for e, s in self._states.items() if e == epoch - 1}
        self._states[epoch] = self._now()

    def to_json(self, epoch: int) -> list[Any]:
        """Return the states with which an epoch was opened, or would be opened now."""
        return self._states.get(epoch) or self._now()

    def resume(self, epoch: int, states: Any) -> None:
        """Use the result of `to_json` to open an epoch later. Raises `ValueError` for anything
        else, and `DataError` for the states of another loader."""
        if not isinstance(states, list) or not all(map(_is_state, states)):
            raise ValueError(f"not states of generators: {states!r:.200}")
        kinds = [next(iter(state)) for state in states]
        own = [next(iter(state_of(generator))) for generator in self._generators]
        if kinds != own:
            raise DataError(
                f"the loader of train_data has generators {own}, and the checkpoint's had {kinds}: "
                "resume with a loader like the one that was trained on"
            )
        self._states = {epoch: states}

    def _now(self) -> list[Any]:
        return [state_of(generator) for generator in self._generators]


def states_of(everyone: Sequence[list[Any]]) -> list[Any]:
    """Return the states of all ranks for a checkpoint; only one state if all are equal."""
    return list(everyone[:1]) if all(each == everyone[0] for each in everyone) else list(everyone)


def own_states(stored: Any, rank: int, size: int) -> Any:
    """Return this rank's states from the result of `states_of`. Raises `ValueError` for anything
    else, and `DataError` for states of another number of ranks."""
    if not isinstance(stored, list) or not stored:
        raise ValueError(f"not states of generators: {stored!r:.200}")
    if len(stored) not in (1, size):
        raise DataError(
            f"each of {len(stored)} ranks had a loader with random numbers of its own, and there "
            f"are {size} ranks: resume with {len(stored)}, or hand over the data set itself, which "
            "resumes with any"
        )
    return stored[rank % len(stored)]


def _is_own_generator(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    if isinstance(value, torch.Generator):
        return value is not torch.default_generator and value.device.type == "cpu"
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom) and value is not getattr(
            random, "_inst", None
        )
    return numpy is not None and isinstance(
        value, (numpy.random.Generator, numpy.random.RandomState)
    )


def state_of(generator: Any) -> dict[str, Any]:
    """Return the state of a generator, or of the module `random` or `numpy.random`, by the
    library's name; JSON types."""
    if isinstance(generator, torch.Generator):
        state = generator.get_state().numpy().tobytes()
        return {"torch": base64.b64encode(state).decode()}
    if hasattr(generator, "getstate"):
        version, words, gauss = generator.getstate()
        return {"python": [version, list(words), gauss]}
    if hasattr(generator, "get_state"):
        return {"numpy": _plain(generator.get_state(legacy=False))}
    return {"numpy": _plain(generator.bit_generator.state)}


def _plain(value: Any) -> Any:
    """Convert NumPy's state to plain lists and numbers."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def set_state_of(generator: Any, state: dict[str, Any]) -> None:
    """Restore a generator to the result of `state_of`. Raises `DataError` for the state of another
    generator."""
    try:
        if "torch" in state:
            raw = bytearray(base64.b64decode(state["torch"], validate=True))
            generator.set_state(torch.frombuffer(raw, dtype=torch.uint8))
        elif "python" in state:
            version, words, gauss = state["python"]
            generator.setstate((version, tuple(words), gauss))
        elif hasattr(generator, "set_state"):
            generator.set_state(_arrays(state["numpy"]))
        else:
            generator.bit_generator.state = _arrays(state["numpy"])
    except (RuntimeError, TypeError, ValueError, KeyError, OverflowError) as error:
        raise DataError(
            f"the state of a generator in the checkpoint, {state!r:.80}, is not one of "
            f"{type(generator).__name__}: {error}"
        ) from error


def _arrays(value: Any) -> Any:
    """Convert the lists that `_plain` made back to arrays."""
    if isinstance(value, dict):
        return {key: _arrays(part) for key, part in value.items()}
    return sys.modules["numpy"].array(value) if isinstance(value, list) else value


def _is_state(value: Any) -> bool:
    return isinstance(value, dict) and len(value) == 1 and value.keys() <= _LIBRARIES
