"""Match submodules with the patterns of a recipe, and sizes with the numbers that they divide."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable

from torch import nn

from ...kernel.errors import RecipeError

__all__ = ["largest_divisor", "matching"]


def matching(module: nn.Module, field: str, patterns: Iterable[str]) -> list[tuple[str, str]]:
    """Return each pattern with each name that it matches, in order of the patterns. Raises
    `RecipeError` for a pattern that matches none; `field` names it in `Parallel`.
    """
    names = [name for name, _ in module.named_modules() if name]
    found = []
    for pattern in patterns:
        fitting = fnmatch.filter(names, pattern)
        if not fitting:
            (nearest,) = difflib.get_close_matches(pattern, names, 1, 0.0) or ("none",)
            raise RecipeError(
                f"Parallel.{field} names {pattern!r}, which fits no submodule: the nearest is "
                f"{nearest!r}"
            )
        found += [(pattern, name) for name in fitting]
    return found


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of `number` that is at most `most`."""
    return next(n for n in range(most, 0, -1) if number % n == 0)
