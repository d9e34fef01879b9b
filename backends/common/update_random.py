"""Random numbers that an update draws, as for stochastic rounding, Langevin noise or dropout of
updates.

Within an update all generators are seeded by a function of the run's seed, the number of the update
and the part of the weights that is updated. Afterwards they continue where they were. So ranks that
hold the same weights draw alike, and ranks that hold other parts draw otherwise. Nothing is saved:
a resumed run counts its updates from there. What an update draws changes neither data nor dropout.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from ...data.random_state import (
    device_state,
    host_state,
    seed_generators,
    set_device_state,
    set_host_state,
)
from .models import NO_CONTEXT, kinds_of
from .optimizer_step import draws_nothing

__all__ = ["Source", "UpdateRandom", "drawing_apart"]


@dataclass(frozen=True)
class Source:
    """A generator, or several that are seeded together. `restore` takes what `state` returned."""

    state: Callable[[], Any]
    seed: Callable[[int], object]
    restore: Callable[[Any], object]


_HOST = Source(host_state, seed_generators, set_host_state)


def of_device(device: torch.device) -> list[Source]:
    """Return torch's generator of an accelerator. None of its functions waits for the device."""
    if device.type == "cpu":
        return []
    return [
        Source(
            partial(device_state, device),
            torch.get_device_module(device).manual_seed,
            partial(set_device_state, device),
        )
    ]


class UpdateRandom:
    """The random numbers of an engine's updates.

    `seed`: the run's. `on_device`: generators besides those of the host. `part`: number of the part
    of the weights that this rank updates; 0 where all ranks update the same.
    """

    def __init__(self, seed: int, on_device: Sequence[Source] = (), part: int = 0) -> None:
        self._seed, self._sources, self._part = seed, (_HOST, *on_device), part
        self._number, self._entered = 1, 0

    def begin(self, number: int) -> None:
        """Set the number of the next update, the first of which is 1."""
        self._number = number

    def update(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Enclose an update by `optimizer`. It costs nothing with an optimizer of torch's own: none
        of them draws."""
        if draws_nothing(optimizer) or (
            len(kinds := kinds_of(optimizer)) > 1 and all(map(draws_nothing, kinds))
        ):
            return NO_CONTEXT
        return self._update(optimizer)

    @contextmanager
    def _update(self, optimizer: Optimizer) -> Iterator[None]:
        try:
            with self.of_part(optimizer):
                yield
        finally:
            self._number, self._entered = self._number + 1, 0

    @contextmanager
    def of_part(self, optimizer: Optimizer, part: str = "") -> Iterator[None]:
        """Enclose the update of tensors of which this rank holds `part`, within that of others."""
        place = f"{self._seed} {self._number} {self._entered} {self._part} {part}"
        digest = hashlib.blake2b(place.encode(), digest_size=8).digest()
        seed, self._entered = int.from_bytes(digest, "little") >> 1, self._entered + 1
        sources = [*self._sources, *_owned(optimizer)]
        before = [source.state() for source in sources]
        for index, source in enumerate(sources):
            source.seed((seed + index) % 2**63)
        try:
            yield
        finally:
            for source, state in zip(sources, before, strict=True):
                source.restore(state)


def drawing_apart(optimizer: Optimizer, device: torch.device) -> AbstractContextManager[None]:
    """Enclose steps of a trial, or of a twin that has the optimizer's generators. Afterwards all
    generators continue where they were."""
    return UpdateRandom(0, of_device(device)).of_part(optimizer)


def _owned(optimizer: Optimizer) -> list[Source]:
    """Return the generators among the attributes, groups and state of an optimizer, each once."""
    states: list[Any] = [optimizer.state, *optimizer.state.values()]
    holders = [*map(vars, kinds_of(optimizer)), *optimizer.param_groups]
    holders += [state for state in states if isinstance(state, dict)]
    kinds = _kinds_of_generators()
    found = {id(v): v for holder in holders for v in holder.values() if type(v) in kinds}
    return [_source_of(generator) for generator in found.values()]


def _kinds_of_generators() -> set[type]:
    numpy: Any = sys.modules.get("numpy")
    of_numpy = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return {torch.Generator, random.Random, *of_numpy}


def _source_of(generator: Any) -> Source:
    if isinstance(generator, torch.Generator):
        return Source(generator.get_state, generator.manual_seed, generator.set_state)
    if isinstance(generator, random.Random):
        return Source(generator.getstate, generator.seed, generator.setstate)
    bits = getattr(generator, "bit_generator", None)
    if bits is None:  # NumPy's older generator
        return Source(
            generator.get_state, lambda value: generator.seed(value % 2**32), generator.set_state
        )

    def put(state: Any) -> None:
        bits.state = state

    return Source(lambda: bits.state, lambda value: put(type(bits)(value).state), put)
