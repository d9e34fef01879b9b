"""Chooses the submodules whose weights are gathered, and freed, together."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from ...data.repeated_blocks import is_callable, repeated_blocks
from ...kernel.errors import RecipeError
from ...kernel.plan import Layout, Plan
from ..common import models

DEFAULT_MIN_PARAMS = 1_000_000
"""Least number of parameters of a unit, in a model without repeated blocks."""


def choose_units(
    root: nn.Module, patterns: Sequence[str], min_params: int | None
) -> list[nn.Module]:
    """Submodules, inner ones before those around them; what they leave is the root's.

    By class name or pattern of names; else by size when `min_params` is given; else the repeated
    blocks; else by size. A weight that two units share would have to be gathered by both: units
    that were not asked for by pattern are dissolved then, others raise `RecipeError`.
    """
    names = {part: name for name, part in root.named_modules()}
    if patterns:
        chosen = _matching(names, patterns)
    elif min_params is not None:
        chosen = _large(root, min_params)
    else:
        chosen = repeated_blocks(root) or _large(root, DEFAULT_MIN_PARAMS)
    while shared := _shared(root, chosen):
        if patterns:
            weights = "; ".join(
                f"{' = '.join(tied)} in {', '.join(sorted(names[u] or 'the root' for u in units))}"
                for tied, units in shared
            )
            raise RecipeError(
                f"backend.wrap separates tied weights ({weights}); they must lie in one unit: "
                "wrap a module around all of them, or leave them to the root"
            )
        chosen = [unit for unit in chosen if not any(unit in units for _, units in shared)]
    order = list(names)
    return sorted(chosen, key=order.index, reverse=True)


def _matching(names: dict[nn.Module, str], patterns: Sequence[str]) -> list[nn.Module]:
    chosen: list[nn.Module] = []
    for pattern in patterns:
        found = [
            part
            for part, name in names.items()
            if name
            and is_callable(part)
            and (type(part).__name__ == pattern or fnmatch.fnmatchcase(name, pattern))
        ]
        if not found:
            classes = sorted({type(part).__name__ for part in names})
            raise RecipeError(
                f"backend.wrap pattern {pattern!r} matches no submodule with a forward; it may be "
                f"a class name ({', '.join(classes)}) or a pattern of names such as 'blocks.*'"
            )
        chosen += [part for part in found if part not in chosen]
    return chosen


def _large(root: nn.Module, min_params: int) -> list[nn.Module]:
    chosen: list[nn.Module] = []

    def left_over(part: nn.Module, is_unit: bool) -> int:
        left = sum(parameter.numel() for parameter in part.parameters(recurse=False))
        # attention reads its projection's weights without calling it
        inside = not isinstance(part, nn.MultiheadAttention)
        left += sum(left_over(child, is_unit and inside) for child in part.children())
        if not (is_unit and part is not root and is_callable(part) and left >= max(min_params, 1)):
            return left
        if part not in chosen:
            chosen.append(part)
        return 0

    left_over(root, True)
    return chosen


def _shared(root: nn.Module, units: Sequence[nn.Module]) -> list[tuple[list[str], set[nn.Module]]]:
    """(names of a tied weight, the units that hold it) where those are more than one."""
    found: dict[nn.Parameter, tuple[list[str], set[nn.Module]]] = {}
    for name, parameter, unit in held(root, set(units), root, ""):
        tied, holders = found.setdefault(parameter, ([], set()))
        tied.append(name)
        holders.add(unit)
    return [(tied, holders) for tied, holders in found.values() if len(holders) > 1]


def held(
    part: nn.Module, units: set[nn.Module], unit: nn.Module, prefix: str
) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    """Yield each name of a parameter, the parameter, and the unit that holds it."""
    unit = part if part in units else unit
    for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
        yield prefix + name, parameter, unit
    for name, child in part.named_children():
        yield from held(child, units, unit, f"{prefix}{name}.")


def sharded_layout(
    plan: Plan,
    model: nn.Module,
    units: Sequence[nn.Module],
    state_bytes: Mapping[str, int],
    *,
    num_parts: int,
    gathered: torch.dtype,
    keeps_gathered: bool,
    accumulates_whole: bool,
    notes: tuple[str, ...] = (),
) -> Layout:
    """A part of everything on each rank, and a unit or two whole for a while.

    `keeps_gathered`: units stay whole through a step. `accumulates_whole`: gradients stay whole
    between microbatches.
    """
    names = {part: name for name, part in model.named_modules()}
    largest = {name: _part_of(p, num_parts) for name, p in model.named_parameters()}
    whole: Counter[nn.Module] = Counter()
    seen: set[nn.Parameter] = set()
    for _, parameter, unit in held(model, set(units), model, ""):
        if parameter not in seen:
            seen.add(parameter)
            whole[unit] += parameter.numel()
    root = whole.pop(model, 0)
    sizes = sorted(whole.values(), reverse=True)
    # while one unit computes, the next is gathered; a unit's gradient is whole until it is reduced
    whole_now = root + sum(sizes if keeps_gathered else sizes[:2])
    summed = root + (sum(sizes) if accumulates_whole else max(sizes, default=0))
    tied = tuple(f"{' = '.join(g)} is one parameter" for g in models.tied_groups(model))
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return Layout(
        parameter_bytes=sum(
            largest[name] * p.element_size() for name, p in model.named_parameters()
        )
        + sum(buffer.nbytes for buffer in model.buffers()),
        gradient_bytes=sum(largest[name] * p.element_size() for name, p in trained),
        optimizer_bytes=sum(
            -(-state_bytes.get(name, 0) * largest[name] // max(p.numel(), 1)) for name, p in trained
        ),
        transient_bytes=whole_now * gathered.itemsize + summed * plan.precision.reduce.itemsize,
        units=tuple(names[unit] for unit in reversed(units)),
        notes=(*tied, f"units are gathered in {gathered}", *notes),
    )


def _part_of(parameter: nn.Parameter, num_parts: int) -> int:
    """Elements of the largest part, split along the first dimension."""
    if not parameter.dim() or not parameter.numel():
        return parameter.numel()
    rows = len(parameter)
    return -(-rows // num_parts) * (parameter.numel() // rows)
