"""The ranks that hold one part of a model together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Peers"]


@dataclass(frozen=True)
class Peers:
    """This rank among the `size` ranks that hold the same layers, whole or in parts: all ranks, or
    those of one pipeline stage.
    """

    rank: int
    """Index of this rank among the peers."""
    size: int
    first: int = 0
    """Global rank of the first peer."""
    group: Any = None
    """Process group of the peers; None: all ranks."""
