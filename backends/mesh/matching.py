"""What fits: submodules the patterns of a recipe, sizes a number that they divide."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable

from torch import nn

from ...kernel.errors import RecipeError

__all__ = ["largest_divisor", "matching"]


def matching(module: nn.Module, field: str, patterns: Iterable[str]) -> list[tuple[str, str]]:
    """Each pattern with each name that it fits, in this order. Raises `RecipeError` for a pattern
    of that field of `Parallel` that fits none."""
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
    """Of that number, up to a size that may not divide it."""
    return next(n for n in range(most, 0, -1) if number % n == 0)
