"""Runs a step without memory for each way to place a run, and keeps those that fit."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..data.repeated_blocks import repeated_blocks
from ..kernel.contract import Driver
from ..kernel.errors import DrivetrainError
from ..kernel.optional import ListsOptions
from ..kernel.recipe import Recipe
from ..registry import refuse_unpromised
from ..symbolic.equal_blocks import find_equal_blocks
from ..symbolic.first_batch import first_batch
from ..symbolic.step import STATE, NotSymbolic, SymbolicStep, symbolic_step
from ..trainer.memory_parts import size_of
from ..trainer.recipe_checks import check_model, without_memory
from ..trainer.settings import Settings
from .devices import Device
from .estimate import Estimate, estimate

__all__ = ["VARIED", "Choice", "LeftOut", "Planned", "Search", "Way"]

VARIED = ("precision", "micro_batch", "activation_checkpointing")
"""Settings that a plan chooses, unless they are given."""
_PRECISIONS = ("fp32", "bf16")
_USED = 0.9
"""The part of a device's memory that a plan uses. The rest is for the allocator's gaps and for
libraries, which no step shows."""


@dataclass(frozen=True)
class Choice:
    """A way to place a run."""

    backend: str
    options: Mapping[str, Any]
    """Options of the driver that differ from its defaults."""
    settings: Mapping[str, Any]
    """The values of those of `VARIED` that are chosen here."""


@dataclass(frozen=True)
class Planned:
    """A way that fits."""

    choice: Choice
    bytes: Mapping[str, int]
    """The memory of a rank at the fullest moment of a step, by kind."""
    num_microbatches: int
    estimate: Estimate

    @property
    def total_bytes(self) -> int:
        """The sum of all kinds."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class LeftOut:
    """A way that is not possible, or does not fit."""

    choice: Choice
    reason: str
    needed_bytes: int = 0
    """The memory that it needs, if this is the reason."""
    state_bytes: int = 0
    """The part of it that stays from step to step, whatever the microbatch."""


@dataclass(frozen=True)
class Way:
    """A driver with options and a precision; `Search.look` chooses the other settings."""

    driver: Driver
    options: Mapping[str, Any]
    settings: Settings


class Search:
    """Looks for ways to place a recipe on ranks with a device each.

    `given`: names of settings that are given, and so not varied (see `VARIED`)."""

    def __init__(
        self,
        recipe: Recipe,
        world_size: int,
        device: Device,
        given: Collection[str] = (),
    ) -> None:
        self.recipe, self.world_size = recipe, world_size
        self.device = device.in_machines_of(world_size)
        self.usable_bytes, self.given = _USED * device.memory_bytes, given
        model = without_memory(recipe)
        blocks = [] if model is None else repeated_blocks(model)
        self._recomputed = tuple(sorted({type(block).__name__ for block in blocks}))
        self._equal_blocks = find_equal_blocks(recipe)

    def ways(
        self, driver: Driver, settings: Settings, options: Mapping[str, Any]
    ) -> list[Way] | LeftOut:
        """Return the ways of a driver. `options`: those of its options that are given. If it lists
        none with these, they are the only way."""
        probe = driver.probe()
        if not probe.usable:
            return LeftOut(Choice(driver.name, options, {}), f"cannot run here: {probe.reason}")
        if not isinstance(driver, ListsOptions):
            reason = "does not list ways to place a model on accelerators"
            return LeftOut(Choice(driver.name, options, {}), reason)
        fitting: list[Mapping[str, Any]] = [
            listed
            for listed in driver.list_options(self.recipe, self.world_size)
            if all(listed.get(name, value) == value for name, value in options.items())
        ]
        return [
            _with(Way(driver, {**listed, **options}, settings), precision=precision)
            for listed in fitting or [{}]
            for precision in self._values(settings, "precision", _PRECISIONS)
        ]

    def look(self, way: Way) -> list[Planned | LeftOut]:
        """Return what becomes of a way: without recomputation, and with it if fewer samples fit
        otherwise."""
        found: list[Planned | LeftOut] = []
        recomputed = [(), self._recomputed] if self._recomputed else [()]
        is_tight = False
        for names in self._values(way.settings, "activation_checkpointing", recomputed):
            way = _with(way, activation_checkpointing=names)
            try:
                self._check(way)
                found.append(self._fitting(way, is_tight))
            except (DrivetrainError, NotSymbolic) as error:
                found.append(LeftOut(self._choice(way), str(error)))
                break
            last, is_given = found[-1], "micro_batch" in self.given
            if isinstance(last, Planned) and (is_given or last.num_microbatches == 1):
                break
            if isinstance(last, LeftOut) and last.state_bytes > self.usable_bytes:
                break
            is_tight = isinstance(last, LeftOut)
        return found

    def _values(self, settings: Settings, name: str, values: Sequence[Any]) -> Sequence[Any]:
        return [getattr(settings, name)] if name in self.given else values

    def _choice(self, way: Way) -> Choice:
        defaults = way.driver.options_type()
        differing = {
            name: value for name, value in way.options.items() if getattr(defaults, name) != value
        }
        chosen = {name: getattr(way.settings, name) for name in VARIED}
        return Choice(way.driver.name, differing, chosen)

    def _check(self, way: Way) -> None:
        """Raises the errors of a driver that refuses the way before a step."""
        plan = way.settings.plan(way.driver.options_type(**way.options))
        refuse_unpromised(way.driver, plan, self.world_size)
        check_model(way.driver, self.recipe, plan)

    def _fitting(self, way: Way, is_tight: bool) -> Planned | LeftOut:
        """Choose the largest microbatch that fits, a power of two or all samples of a reader, and
        return it, or the memory that the smallest one needs. `is_tight`: not even one sample may
        fit, so it is tried before all of them."""
        steps: dict[int | None, SymbolicStep] = {}

        def fits(size: int | None) -> bool:
            if size not in steps:
                steps[size] = self._run(way if size is None else _with(way, micro_batch=size))
            return self._fits(steps[size])

        def judged(size: int) -> Planned | LeftOut:
            return self._judged(_with(way, micro_batch=size), steps[size])

        is_given = "micro_batch" in self.given
        if is_tight and not is_given and not fits(1):
            return judged(1)
        if fits(None) or is_given or steps[None].samples_of_reader == 1:
            return self._judged(way, steps[None])
        if not fits(1):
            return judged(1)
        # powers of two below the number of samples
        sizes = [2**n for n in range((steps[None].samples_of_reader - 1).bit_length())]
        return judged(sizes[bisect_left(sizes, True, lo=1, key=lambda size: not fits(size)) - 1])

    def _run(self, way: Way) -> SymbolicStep:
        driver, settings = way.driver, way.settings
        plan = settings.plan(driver.options_type(**way.options))
        batch_of = partial(first_batch, self.recipe, settings)
        return symbolic_step(
            self.recipe, driver, plan, settings, self.world_size, batch_of, self._equal_blocks
        )

    def _fits(self, step: SymbolicStep) -> bool:
        return _total(step) <= self.usable_bytes

    def _judged(self, way: Way, step: SymbolicStep) -> Planned | LeftOut:
        choice = self._choice(way)
        if self._fits(step):
            found = estimate(step, self.device)
            return Planned(choice, step.bytes, step.num_microbatches, found)
        largest = max(step.bytes, key=lambda kind: step.bytes[kind])
        return LeftOut(
            choice,
            f"needs {size_of(_total(step))}, most of it {largest} ({size_of(step.bytes[largest])})",
            _total(step),
            sum(step.bytes.get(kind, 0) for kind in STATE),
        )


def _total(step: SymbolicStep) -> int:
    return sum(step.bytes.values())


def _with(way: Way, **settings: Any) -> Way:
    return dataclasses.replace(way, settings=dataclasses.replace(way.settings, **settings))
