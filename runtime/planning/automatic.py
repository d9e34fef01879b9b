"""The way to place a run that `auto` takes on several ranks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.storage.local import replace_text
from ..kernel.errors import DrivetrainError
from ..kernel.plan import Probe
from ..kernel.recipe import Recipe
from ..launched import shared_folder, world_size
from ..registry import find_driver, memory_of_a_rank
from ..trainer.memory_parts import size_of
from ..trainer.recipe_checks import without_memory
from ..trainer.setting_values import as_text
from ..trainer.settings import Settings
from .devices import DEVICES, Device
from .processes import Found, Lister, Progress, listing_drivers, look_at_drivers
from .search import Search

__all__ = ["Taken", "Watchers", "device_here", "is_small", "taken"]

_TIMES = 8
"""A model is small if a rank's memory holds its weights so many times: gradients, and the state of
AdamW, are three times as large as the weights, and a microbatch can be small."""
_LIKE = "h100"
"""The device whose speeds an unknown one is taken to have."""


def _show_nothing(found: Found, search: Search) -> None:
    pass


def _quietly() -> AbstractContextManager[Progress]:
    return nullcontext(lambda done, total, fitting: None)


@dataclass(frozen=True)
class Watchers:
    """Functions that are called on the one rank that looks."""

    report: Callable[[str], None]
    """Takes one line on the result."""
    show: Callable[[Found, Search], None] = _show_nothing
    """Takes all that was found."""
    looking: Callable[[], AbstractContextManager[Progress]] = _quietly
    """Returns the context to look in, which yields a display of the progress."""


@dataclass(frozen=True)
class Taken:
    """A way to place a run that was found by looking at all."""

    backend: str
    options: Mapping[str, Any]
    """Options of the driver that differ from its defaults."""
    settings: Mapping[str, Any]
    """The settings that it needs, other than those that were given."""
    reason: str
    """One line on what was looked at."""

    def __str__(self) -> str:
        chosen = {**self.options, **self.settings}
        words = [f"{name}={as_text(value)}" for name, value in chosen.items()]
        return f"auto takes {' '.join([self.backend, *words])}, {self.reason}"


def taken(
    recipe: Recipe,
    settings: Settings,
    given: Collection[str],
    watchers: Watchers,
    *,
    always: bool = False,
) -> Taken | None:
    """Return the quickest way that fits, or the one that needs the least if none does. All ranks of
    a run call this: the first one looks, and the others wait for what it finds.

    None, without a look, unless these are several ranks of one machine that drivetrain has started;
    and for a small model (`is_small`), unless `always`. None as well if the look fails. `given`:
    names of settings that are not varied; precision never is.
    """
    folder = shared_folder()
    if folder is None:
        return None
    probe = find_driver("auto").probe()
    if not always and is_small(recipe, memory_of_a_rank(probe, world_size())):
        return None
    search = (recipe, world_size(), device_here(probe, world_size()), {*given, "precision"})
    found = _once(folder, lambda: _look(Search(*search), settings, watchers))
    return None if found is None else Taken(**found)


def is_small(recipe: Recipe, memory_bytes: int) -> bool:
    """Return True if no step needs to be run to know that the best driver can hold the model, or
    if neither its size nor the memory is known."""
    model = without_memory(recipe)
    if model is None or not memory_bytes:
        return True
    return _TIMES * sum(each.nbytes for each in model.parameters()) <= memory_bytes


def device_here(probe: Probe, num_ranks: int) -> Device:
    """Return the device that each of these ranks of this machine has, with the speeds of its data
    sheet, or else those of another one, which the name says."""
    name = ", ".join(sorted({*probe.devices}))
    known = next((each for each in DEVICES if each in name.lower()), None)
    return dataclasses.replace(
        DEVICES[known or _LIKE],
        name=name if known else f"{name}, as quick as {_LIKE}",
        memory_bytes=memory_of_a_rank(probe, num_ranks),
        ranks_per_machine=num_ranks,
    )


def _look(search: Search, settings: Settings, watchers: Watchers) -> dict[str, Any] | None:
    """Return the fields of the way that is taken."""
    drivers = [find_driver(name) for name in listing_drivers()]
    listers: list[Lister] = [
        (each, settings, {}) for each in drivers if each.probe().preference >= 0
    ]
    try:
        with watchers.looking() as progress:
            found = look_at_drivers(search, listers, progress)
    except DrivetrainError as error:
        watchers.report(f"auto compares no ways to place the run: {error}")
        return None
    watchers.show(found, search)
    memory = size_of(search.device.memory_bytes)
    too_large = [each for each in found.left_out if each.needed_bytes]
    if found.fits:
        choice, number = found.fits[0].choice, len(found.fits)
        which = f"the quickest of {number} ways that fit" if number > 1 else "which alone fits"
        reason = f"{which}: a rank needs {size_of(found.fits[0].total_bytes)} of {memory}"
    elif too_large:
        least = min(too_large, key=lambda each: each.needed_bytes)
        choice = least.choice
        reason = f"since none of {len(too_large)} ways fits into {memory}: it {least.reason}"
    else:
        watchers.report("auto finds no way to place the run that can be looked at")
        return None
    needed = {
        name: value for name, value in choice.settings.items() if value and name not in search.given
    }
    way = Taken(choice.backend, choice.options, needed, reason)
    watchers.report(str(way))
    return dataclasses.asdict(way)


def _once(folder: Path, make: Callable[[], Any]) -> Any:
    """Return what `make` returns in one of the processes, as JSON keeps it. The others wait; if it
    dies, the next one calls `make`."""
    import fcntl  # Windows has none

    path = folder / "taken"
    with Path(folder, "taking").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)  # until it is closed, or this process ends
        if not path.exists():
            replace_text(path, json.dumps(make()))
        return json.loads(path.read_text())
