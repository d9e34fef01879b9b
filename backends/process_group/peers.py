"""The ranks that hold one part of a model together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Peers"]


@dataclass(frozen=True)
class Peers:
    """This rank, of `size` ranks that hold the same layers, be it in parts: all ranks, or those of
    one stage of a pipeline."""

    rank: int
    """Among them."""
    size: int
    first: int = 0
    """The rank, among all, of the first of them."""
    group: Any = None
    """Their process group; None: all ranks."""
