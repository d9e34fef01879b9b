"""Finds drivers by name.

The table below is the one place in the kernel that knows the names of the drivers that ship with
drivetrain; they are imported when asked for. Others come from the entry-point group
`drivetrain.backends`: a name and a `module:attribute` that is a `Driver`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from .contract import Driver
from .errors import BackendUnavailable, CapabilityRefused, UnknownBackend
from .plan import Plan

__all__ = ["DUTIES", "find_driver", "known_backends", "refuse_unpromised", "usable_driver"]

ENTRY_POINT_GROUP = "drivetrain.backends"
DUTIES = ("timeout_seconds", "stall_seconds")
"""Settings that a driver of several processes may keep, or not."""

_PACKAGE = __package__.rpartition(".")[0] + ".backends."
_SHIPPED = {
    name: EntryPoint(name, _PACKAGE + target, ENTRY_POINT_GROUP)
    for name, target in {
        "cpu": "cpu:driver",
        "ddp": "ddp:driver",
        "fsdp": "fsdp.driver:driver",
        "deepspeed": "deepspeed.driver:driver",
        "xla": "xla.driver:driver",
        "ipex": "ipex:driver",
        "xpu": "xpu:driver",
        "mesh": "mesh.driver:driver",
    }.items()
}


@cache
def _others() -> Mapping[str, EntryPoint]:  # to find them, all that is installed is looked through
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}


def known_backends() -> tuple[str, ...]:
    """The names of all drivers, shipped ones first; none is imported."""
    return (*_SHIPPED, *sorted(set(_others()) - set(_SHIPPED)))


def find_driver(name: str) -> Driver:
    """The driver called `name`, or the best usable one for `auto`.

    Raises `UnknownBackend`, with the nearest known name, and `BackendUnavailable` when a
    third-party driver cannot be imported.
    """
    if name == "auto":
        return _best()
    target = _SHIPPED.get(name) or _others().get(name)
    if target is None:
        near = difflib.get_close_matches(name, known_backends(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        known = ", ".join((*known_backends(), "auto"))
        raise UnknownBackend(f"no backend is called {name!r}.{hint} Known: {known}")
    try:
        return cast(Driver, target.load())
    except (ImportError, AttributeError) as error:
        raise BackendUnavailable(
            f"backend {name!r} ({target.value}) cannot be imported: {error}. Reinstall the package "
            "that provides it, or ask its authors"
        ) from error


def usable_driver(name: str) -> Driver:
    """`find_driver`, and it runs on this machine. Raises `BackendUnavailable` with the reason."""
    driver = find_driver(name)
    probe = driver.probe()
    if not probe.usable:
        remedy = f" Install it with: {probe.install}" if probe.install else ""
        raise BackendUnavailable(
            f"backend {driver.name!r} cannot run here: {probe.reason}.{remedy} "
            "`drivetrain backends` shows which can"
        )
    return driver


def refuse_unpromised(driver: Driver, plan: Plan, num_ranks: int = 0) -> None:
    """Raises `CapabilityRefused` for what the driver cannot do in so many ranks; 0: as launched."""
    able = driver.capabilities(plan)
    precision, trains_in = plan.precision.name, ", ".join(sorted(able.precisions))
    lacks = able.why_not.get(precision, f"it trains in {trains_in}")
    size = num_ranks or int(os.environ.get("WORLD_SIZE", "1"))
    several, known, n = size > 1, precision in able.precisions, able.multiple_of_ranks
    asking = able.why_not.get("multiple_of_ranks", "with these options")
    fits = f"{asking} it takes a multiple of {n}: start {n * max(1, round(size / n))} (--nproc)"
    ranks = f"{size} rank{'s' if several else ''}"
    unless = {"compile": "set compile=false", "activation_checkpointing": "leave it empty"}
    for capability, asked, promised, what, remedy in (
        ("precisions", True, known, f"precision {precision}", lacks),
        ("multiple_of_ranks", size % n, False, ranks, fits),
        *((name, getattr(plan, name), getattr(able, name), name, unless[name]) for name in unless),
        (
            "multi_process",
            several,
            able.multi_process,
            "more than one process",
            "launch one process, or choose another backend",
        ),
        *(
            (
                name,
                several and getattr(plan, name) != getattr(Plan, name),
                getattr(able, name),
                f"{name}={getattr(plan, name)}",
                "it does not look after ranks that are late; leave it out",
            )
            for name in DUTIES
        ),
    ):
        if asked and not promised:
            raise CapabilityRefused(what, driver.name, remedy, capability)


def _best() -> Driver:
    drivers = []
    for name in known_backends():
        with suppress(BackendUnavailable):  # a broken third-party package must not stop the others
            drivers.append(find_driver(name))
    ranked = [(probe.preference, driver) for driver in drivers if (probe := driver.probe()).usable]
    if not ranked:
        raise BackendUnavailable("no backend is usable here; `drivetrain backends` says why")
    return max(ranked, key=lambda pair: pair[0])[1]
