"""`drivetrain plan`: ways to place a run on ranks, the quickest first."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ...kernel.errors import BackendUnavailable, SettingError
from ...planning.devices import Device, find_device
from ...planning.processes import Found, Progress, listing_drivers, look_at_drivers
from ...planning.search import VARIED, Choice, Planned, Search
from ...registry import find_driver
from ...run.quoted import quoted
from ...run.tables import table
from ...trainer.memory_parts import size_of
from ...trainer.setting_values import as_text
from .config_files import TRANSFORMERS, of_transformers
from .recipe_file import DEFAULT_RECIPE, TRANSFORMERS_RECIPE, load_recipe_file
from .resolve_settings import Layer, Resolved, merge, resolve, without_backend

__all__ = ["plan", "plan_record", "show_plan", "size_in_bytes"]

Record = dict[str, Any]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i)?)?B?", re.IGNORECASE)
_REASONS_SHOWN = 12


def size_in_bytes(text: str) -> float:
    """Return the number of bytes of a size such as `80GB` or `141 GiB`. Raises `SettingError`."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise SettingError(f"memory {text!r} is no size; give a number and a unit, such as 80GB")
    power = " KMGT".index((found[2] or " ").upper())
    return float(found[1]) * float(1024 if found[3] else 1000) ** power


def plan(
    recipe_path: Path | None,
    backend: str | None,
    layers: Sequence[Layer],
    world_size: int,
    device_name: str,
    memory: str | None = None,
    progress: Progress = lambda done, total, fitting: None,
) -> Record:
    """Return a record of the ways to place a run of `world_size` ranks on a device: `fits`, those
    that fit into its memory, the quickest first, and `left_out`, the others, with reasons.

    Each way is a step of the driver without memory (`symbolic.step`), with options that the driver
    lists, in float32 and bfloat16, and with the largest microbatches that fit. Settings and options
    in `layers` (see `resolve`) are not varied. `backend`: None for all that can run here and list
    ways (`ListsOptions`). `device_name`: see `find_device`. `memory`: a size in place of the
    device's. `progress(done, total, fitting)` is called with the number of ways that were looked
    at, of all, and of those that fit.

    Raises `UsageError` for settings that cannot be resolved, and `SettingError`.
    """
    device = find_device(device_name)
    if memory is not None:
        device = dataclasses.replace(device, memory_bytes=size_in_bytes(memory))
    recipe_path, layers = of_transformers(recipe_path, layers)
    recipe_file = load_recipe_file(recipe_path or DEFAULT_RECIPE)
    names: Sequence[str] = [backend or ""]
    if backend is None:
        names = listing_drivers()
        if not names:
            raise BackendUnavailable("no driver that lists ways to place a model can run here")
        layers = without_backend(layers)
    resolved = {name: resolve(recipe_file, find_driver(name), layers) for name in names}
    first = resolved[names[0]]
    recipe = recipe_file.build(first.config)
    given = {name for name in VARIED if first.sources[name] != "default"}
    search = Search(recipe, world_size, device, given)
    listers = [
        (
            find_driver(name),
            each.settings,
            {key: each.values[f"backend.{key}"] for key in each.backend_options},
        )
        for name, each in resolved.items()
    ]
    found = look_at_drivers(search, listers, progress)
    return plan_record(found, search, first, recipe_path, layers)


def plan_record(
    found: Found,
    search: Search,
    resolved: Resolved,
    recipe_path: Path | None,
    layers: Sequence[Layer],
) -> Record:
    """Return the record of what was found, see `plan`."""
    start = _Start(recipe_path, _given(layers, resolved), search.device, search.world_size)
    return {
        "ranks": search.world_size,
        "device": search.device.name,
        "memory_bytes": search.device.memory_bytes,
        "usable_bytes": search.usable_bytes,
        "global_batch": resolved.settings.global_batch,
        "fits": [_fitting(each, start) for each in found.fits],
        "left_out": [
            {**_chosen(each.choice), "reason": each.reason, "needed_bytes": each.needed_bytes}
            for each in found.left_out
        ],
    }


def _chosen(choice: Choice) -> Record:
    return {
        "backend": choice.backend,
        "options": dict(choice.options),
        "settings": dict(choice.settings),
    }


@dataclass(frozen=True)
class _Start:
    """The part of a command that is the same for all ways."""

    recipe: Path | None
    given: Mapping[str, Any]
    device: Device
    world_size: int


def _given(layers: Sequence[Layer], resolved: Resolved) -> dict[str, Any]:
    """Return the values in the layers, other than those that each way has."""
    merged = merge(layers)
    of_ways = {key for key in merged if key in VARIED or key.startswith("backend.")}
    return {key: resolved.values.get(key, merged[key]) for key in merged.keys() - of_ways}


def _fitting(each: Planned, start: _Start) -> Record:
    found = each.estimate
    return {
        **_chosen(each.choice),
        "bytes": dict(each.bytes),
        "total_bytes": each.total_bytes,
        "microbatches": each.num_microbatches,
        "seconds": found.seconds,
        "compute_seconds": found.compute_seconds,
        "memory_seconds": found.memory_seconds,
        "network_seconds": found.network_seconds,
        "bound": found.bound,
        "flops": found.flops,
        "sent_bytes": dict(found.sent_bytes),
        "utilization": found.utilization,
        "command": _command(each.choice, start),
    }


def _command(choice: Choice, start: _Start) -> str:
    """Return the command of a run that is placed so."""
    chosen, recipe = dict(sorted(start.given.items())), start.recipe
    words = ["train", *([] if recipe is None else [str(recipe)])]
    if recipe == TRANSFORMERS_RECIPE:
        words[-1] = f"{TRANSFORMERS}{chosen.pop('recipe.model')}"
    words += ["--backend", choice.backend]
    chosen |= {name: value for name, value in choice.settings.items() if value}
    chosen |= {f"backend.{name}": value for name, value in choice.options.items()}
    for name, value in chosen.items():
        words += ["--set", f"{name}={as_text(value)}"]
    in_machine = start.device.ranks_per_machine
    if start.world_size == in_machine:
        return shlex.join(["drivetrain", *words, "--nproc", str(start.world_size)])
    started = ["torchrun", "--nnodes", str(start.world_size // in_machine)]
    started += ["--nproc-per-node", str(in_machine)]
    started += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29400", "-m", "drivetrain.cli"]
    return shlex.join([*started, *words])


def show_plan(found: Record, most: int, console: Console) -> None:
    """Print a table of at most so many ways that fit, the reasons against the others, and the
    command of the first."""
    usable, memory = size_of(found["usable_bytes"]), size_of(found["memory_bytes"])
    console.print(
        quoted(
            f"Ways to place {found['ranks']} ranks on {found['device']}, each using at most "
            f"{usable} of {memory}; a step has {found['global_batch']} samples:"
        )
    )
    fits = found["fits"]
    if fits:
        console.print(_table(fits, most))
        if (more := len(fits) - most) > 0:
            console.print(f"{more} more fit: --top shows them")
    else:
        console.print("None fits.")
    for line in _against(found["left_out"]):
        console.print(quoted(line))
    if fits:
        console.print("\nThe first one:")
        console.print(quoted(fits[0]["command"]), soft_wrap=True)


def _table(fits: Sequence[Record], most: int) -> Table:
    figures = ("micro", "memory", "sent", "step", "MFU")
    shown = table("backend", "options", *figures[:-1], "bound", "MFU", figures=figures)
    of_backend = defaultdict(list)
    for each in fits:
        of_backend[each["backend"]].append(each)
    varied = {backend: _varied(ways) for backend, ways in of_backend.items()}
    for each in fits[:most]:
        backend, settings, options = each["backend"], each["settings"], each["options"]
        words = [settings["precision"]]
        words += ["recomputing"] if settings["activation_checkpointing"] else []
        words += _pairs({name: options[name] for name in options if name in varied[backend]})
        row = (
            backend,
            " ".join(words),
            str(settings["micro_batch"] or "all"),
            size_of(each["total_bytes"]),
            size_of(sum(each["sent_bytes"].values())),
            _time(each["seconds"]),
            each["bound"],
            f"{each['utilization']:.0%}",
        )
        shown.add_row(*map(quoted, row))
    return shown


def _varied(ways: Sequence[Record]) -> set[str]:
    """Return the names of the options in which these ways differ."""
    first = ways[0]["options"]
    return {
        name
        for options in (way["options"] for way in ways)
        for name in {*first, *options}
        if options.get(name) != first.get(name)
    }


def _against(left_out: Sequence[Record]) -> Iterator[str]:
    """Yield lines on what was left out: the memory that is needed, by backend, and other
    reasons."""
    needed, reasons = defaultdict(list), defaultdict(list)
    for each in left_out:
        if each["needed_bytes"]:
            needed[each["backend"]].append(each)
        else:
            reasons[each["backend"], each["reason"]].append(each)
    for backend, ways in needed.items():
        least = min(ways, key=lambda each: int(each["needed_bytes"]))
        pairs = " ".join(_pairs({**least["options"], **least["settings"]}))
        yield f"{backend}: {_ways(ways)} not fit; the smallest, {pairs}, {least['reason']}"
    for (backend, reason), ways in list(reasons.items())[:_REASONS_SHOWN]:
        which = f"{_ways(ways)} not work: " if ways[0]["settings"] else ""
        yield f"{backend}: {which}{reason}"
    if (more := len(reasons) - _REASONS_SHOWN) > 0:
        yield f"{more} more reasons against others: --json has all"


def _ways(ways: Sequence[Record]) -> str:
    return "1 way does" if len(ways) == 1 else f"{len(ways)} ways do"


def _pairs(values: Mapping[str, Any]) -> list[str]:
    return [f"{name}={as_text(value)}" for name, value in values.items() if value not in ((), None)]


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
