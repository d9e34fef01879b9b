"""Finds drivers by name.

The table below is the only place outside of the drivers with the names of drivetrain's own drivers.
A driver is imported when it is requested. Third-party drivers come from the entry-point group
`drivetrain.backends`: a name and a `module:attribute` that is a `Driver`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import cast

from .kernel.contract import Driver
from .kernel.errors import BackendUnavailable, CapabilityRefused, UnknownBackend
from .kernel.plan import Plan, Probe
from .launched import rank, world_size

__all__ = [
    "REQUIRED_LIMITS",
    "accelerators",
    "find_driver",
    "install_hint",
    "known_backends",
    "memory_of_a_rank",
    "refuse_unpromised",
    "shipped_backends",
    "usable_driver",
]

ENTRY_POINT_GROUP = "drivetrain.backends"
REQUIRED_LIMITS = ("timeout_seconds", "stall_seconds")
"""Time limits that a plan requires, and that not every driver enforces."""

_PACKAGE = f"{__package__}.backends."
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
        "accelerator": "accelerator:driver",
    }.items()
}


DEVICES = frozenset({"cuda", "gpu", "hip", "mps", "rocm", "tpu"})
"""Names of devices that people give in place of a backend."""


@cache
def _others() -> Mapping[str, EntryPoint]:  # finding them searches all installed packages
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}


def shipped_backends() -> tuple[str, ...]:
    """Return the names of drivetrain's own drivers."""
    return tuple(_SHIPPED)


def known_backends() -> tuple[str, ...]:
    """Return the names of all drivers, drivetrain's own first, without importing any."""
    return (*_SHIPPED, *sorted(set(_others()) - set(_SHIPPED)))


def find_driver(name: str) -> Driver:
    """Return the driver called `name`, or the best usable one for `auto`.

    Raises `UnknownBackend`, with the nearest known name, and `BackendUnavailable` when a
    third-party driver cannot be imported.
    """
    if name == "auto":
        return _best()
    target = _SHIPPED.get(name) or _others().get(name)
    if target is None:
        near = difflib.get_close_matches(name, known_backends(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        if name.lower() in DEVICES:
            here = _best().name
            hint = f" That is a device, which a backend finds by itself: 'auto' is {here!r} here."
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
    """Return the driver called `name`. Raises `BackendUnavailable` if it cannot run here, and
    `SettingError` for an invalid launcher environment."""
    rank(), world_size()
    driver = find_driver(name)
    probe = driver.probe()
    if not probe.usable:
        remedy = f" Install it with: {install_hint(probe.install)}" if probe.install else ""
        raise BackendUnavailable(
            f"backend {driver.name!r} cannot run here: {probe.reason}.{remedy} "
            "`drivetrain backends` shows which can"
        )
    return driver


def accelerators(probe: Probe) -> list[str]:
    """Return the names of the devices that are not the host."""
    return [device for device in probe.devices if not device.startswith("cpu")]


def memory_of_a_rank(probe: Probe, num_ranks: int) -> int:
    """Return the bytes that each of so many ranks of a machine has: those of an accelerator, or a
    part of the host's; 0 if they are unknown."""
    return probe.memory_bytes // (len(accelerators(probe)) or num_ranks)


def refuse_unpromised(driver: Driver, plan: Plan, num_ranks: int = 0) -> None:
    """Raise `CapabilityRefused` for a plan that the driver cannot run with `num_ranks` ranks.

    0 ranks: the number that was launched.
    """
    able = driver.capabilities(plan)
    precision, trains_in = plan.precision.name, ", ".join(sorted(able.precisions))
    lacks = able.why_not.get(precision, f"it trains in {trains_in}")
    size = num_ranks or world_size()
    several, known, n = size > 1, precision in able.precisions, able.multiple_of_ranks
    asking = able.why_not.get("multiple_of_ranks", "with these options")
    fits = f"{asking} it takes a multiple of {n}: start {n * max(1, round(size / n))} (--nproc)"
    ranks = f"{size} rank{'s' if several else ''}"
    unless = {
        "compile": "set compile=false",
        "activation_checkpointing": "leave it empty",
        "max_grad_value": "leave it out, or set max_grad_norm",
    }
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
                "it does not watch for late ranks; leave it out",
            )
            for name in REQUIRED_LIMITS
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


def install_hint(command: str) -> str:
    """Translate `pip install ...` for uv, if uv started this process: an extra of the project in
    this folder is passed to `uv run`, and any other package is added to the project.

    Other commands are returned unchanged, and so is any command if uv did not start this process.
    """
    found = re.fullmatch(r"pip install (\S+)", command)
    if found is None or "UV_RUN_RECURSION_DEPTH" not in os.environ:
        return command
    extra = re.fullmatch(r"'drivetrain\[(\w+)\]'", found[1])
    if extra and _is_ours(Path.cwd()):
        return f"uv run --extra {extra[1]} ..."
    return f"uv add {found[1]}"


def _is_ours(folder: Path) -> bool:
    """True if uv finds drivetrain's own project from this folder."""
    for each in (folder, *folder.parents):
        project = each / "pyproject.toml"
        if project.is_file():
            return re.search(r'^name = "drivetrain"$', project.read_text(), re.M) is not None
    return False
