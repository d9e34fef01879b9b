"""Errors and assertions by which the laws report a breach."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["LawBroken", "require", "require_close", "require_same", "require_same_bits"]


class LawBroken(AssertionError):
    """The driver ran and did something that a law forbids."""


def require(condition: object, message: str) -> None:
    """Raises `LawBroken` with the message unless the condition holds."""
    if not condition:
        raise LawBroken(message)


def require_same(what: str, actual: Any, expected: Any) -> None:
    """Raises `LawBroken` unless the two are equal."""
    require(actual == expected, f"{what}: {actual!r}, expected {expected!r}")


def require_close(
    what: str, actual: Sequence[float], expected: Sequence[float], relative: float
) -> None:
    """Raises `LawBroken` unless each figure is within `relative` of the expected one.

    The message shows the largest deviation and the ratio there, which often shows the mistake: a
    world size, a number of microbatches, a square root of one of them.
    """
    require_same(f"number of figures, {what}", len(actual), len(expected))
    worst, at = 0.0, 0
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        if a == e:  # infinities, too
            continue
        deviation = abs(a - e) / max(abs(e), 1e-12) if math.isfinite(a) else math.inf
        if deviation > worst:
            worst, at = deviation, index
    require(
        worst <= relative,
        f"{what} [{at}] is {actual[at]:.9g}, expected {expected[at]:.9g}: "
        f"ratio {actual[at] / expected[at] if expected[at] else math.inf:.6g}, "
        f"relative deviation {worst:.2g}, allowed {relative:.2g}",
    )


def require_same_bits(
    what: str, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> None:
    """Raises `LawBroken` unless both hold the same names, dtypes, shapes and bits."""
    require_same(f"names, {what}", sorted(actual), sorted(expected))
    differing = [name for name in sorted(expected) if not _same(actual[name], expected[name])]
    if differing:
        first = differing[0]
        a, e = actual[first], expected[first]
        where = f"{a.dtype}{tuple(a.shape)} and {e.dtype}{tuple(e.shape)}"
        if a.shape == e.shape:
            where += f", largest difference {(a.double() - e.double()).abs().max():.3g}"
        raise LawBroken(
            f"{what}: {len(differing)} of {len(expected)} tensors differ in some bit, the first "
            f"is {first} ({where})"
        )


def _same(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    # as bytes: NaN equals itself, and 0.0 is not -0.0
    return torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )
