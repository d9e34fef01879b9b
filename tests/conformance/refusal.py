"""An ability that is not declared must be refused by name, and nothing started (law 7)."""

from __future__ import annotations

from typing import Any

from ..kernel.errors import CapabilityRefused, RecipeError
from .bench import Bench
from .cases import Refused
from .jobs import optimizer_called
from .judge import LawBroken, require, require_same
from .problems import PROBLEMS, Samples
from .subject import Subject

__all__ = ["refuses", "refuses_model", "refuses_optimizer", "refuses_precision"]


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


def preparing(bench: Bench, *, problem: str) -> str:
    """A job: how the model of a problem is refused; nothing where it is taken."""
    try:
        with bench.open() as session:
            session.prepare(PROBLEMS[problem].recipe(optimizer=optimizer_called("SGD")))
    except RecipeError as error:
        return str(error)
    return ""


def refuses_model(subject: Subject, problem: str) -> Refused | None:
    """Where a model cannot be cut as a driver's options ask for, that names the option, on every
    rank and before the first step."""
    (told,) = {*subject.run(preparing, problem=problem)}
    if not told:
        return None
    named = [name for name in subject.options if f"backend.{name}" in told]
    require(bool(named), f"the model of {problem!r} is refused without naming an option: {told}")
    return Refused(told)


def refuses_optimizer(subject: Subject, optimizer: str) -> Refused | None:
    """One that a driver cannot step is named, on every rank and before the first step."""
    for told in subject.run(preparing_optimizer, optimizer=optimizer):
        if told:
            require(optimizer in told, f"{optimizer} is refused without its name: {told}")
            return Refused(told)
    return None


def preparing_optimizer(bench: Bench, *, optimizer: str) -> str:
    """A job: how an optimizer is refused; nothing where it is taken."""
    recipe = PROBLEMS["regression"].recipe(optimizer=optimizer_called(optimizer))
    try:
        with bench.open() as session:
            session.prepare(recipe)
    except CapabilityRefused as refusal:
        return str(refusal)
    return ""


def refuses_precision(subject: Subject, precision: str) -> Refused:
    """The precision is not declared."""
    return refuses(subject, "precisions", precision, {"precision": precision})
