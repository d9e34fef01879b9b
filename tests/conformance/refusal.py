"""An ability that is not declared must be refused by name, and nothing started (law 7)."""

from __future__ import annotations

from typing import Any

from ..kernel.errors import CapabilityRefused
from .bench import Bench
from .cases import Refused
from .judge import LawBroken, require, require_same
from .problems import PROBLEMS, Samples
from .subject import Subject

__all__ = ["refuses", "refuses_precision"]


def ask(bench: Bench, *, settings: dict[str, Any]) -> dict[str, str] | None:
    """A job: train with these settings; how that was refused, or None."""
    recipe = PROBLEMS["regression"].recipe(train_data=Samples("regression", 8))
    try:
        bench.fit(recipe, {"steps": 1, "global_batch": 8, **settings})
    except CapabilityRefused as refusal:
        return {
            "asked": refusal.asked,
            "capability": refusal.capability,
            "driver": refusal.driver,
            "message": str(refusal),
        }
    return None


def refuses(
    subject: Subject,
    capability: str,
    what: str,
    settings: dict[str, Any],
    world: int | None = None,
) -> Refused:
    """Every rank refuses in the same words, which say `what`, and names the field of
    `Capabilities`. Raises `LawBroken` otherwise.
    """
    first, *others = subject.run(ask, world=world, settings=settings)
    if first is None:
        raise LawBroken(f"{what} is not declared, and asking for it was not refused")
    require(all(other == first for other in others), f"ranks refuse {what} differently")
    require_same("the refused capability", first["capability"], capability)
    require(what in first["asked"], f"{first['asked']!r} was refused where {what!r} was asked")
    named = first["driver"] == subject.facts.name and subject.facts.name in first["message"]
    require(named, f"the refusal does not name the driver: {first}")
    require(what in first["message"], f"the refusal does not say what it refuses: {first}")
    return Refused(first["message"])


def refuses_precision(subject: Subject, precision: str) -> Refused:
    """The precision is not declared."""
    return refuses(subject, "precisions", precision, {"precision": precision})
