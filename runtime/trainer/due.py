"""Actions that are due after a step."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Due"]


@dataclass
class Due:
    """Actions that are due after a step, and not done yet."""

    log: bool = False
    evaluate: bool = False
    save: bool = False
